/* A tool as NVTX 3 loads it: takes the ranges of the program and writes down what it is told, "+name" and "-". */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef void (*function)(void);

struct callback_table {
  size_t struct_size;
  int (*get_module_functions)(int module, function ***out_slots, unsigned int *out_count);
};
struct version_table {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;
  void (*set_tool_version)(uint32_t version);
};

static char text[4096];
static int answer = 1;

static void note(const char *sign, const char *name) {
  if (strlen(text) + strlen(name) + 3 > sizeof text) return;
  strcat(text, sign);
  strcat(text, name);
}

static int push(const char *name) {
  note("+", name);
  return 0;
}
static int pop(void) {
  note("-", "");
  return 0;
}

EXPORT const char *fake_profiler_text(void);
EXPORT void fake_profiler_clear(int new_answer);
EXPORT int InitializeInjectionNvtx2(const void *(*get_table)(uint32_t id));

const char *fake_profiler_text(void) { return text; }

/* new_answer: what the next program that comes is told, 0: no. */
void fake_profiler_clear(int new_answer) {
  text[0] = '\0';
  answer = new_answer;
}

int InitializeInjectionNvtx2(const void *(*get_table)(uint32_t id)) {
  const struct version_table *version = (const struct version_table *)get_table(3);
  const struct callback_table *callbacks = (const struct callback_table *)get_table(1);
  function **slots = NULL;
  unsigned int count = 0;
  if (!answer || version == NULL || version->struct_size < sizeof *version || version->version != 3) return 0;
  version->set_tool_version(3);
  if (callbacks == NULL || callbacks->struct_size < sizeof *callbacks || get_table(99) != NULL) return 0;
  if (callbacks->get_module_functions(5, &slots, &count) || !callbacks->get_module_functions(1, &slots, &count)) return 0;
  if (count <= 11 || slots[count] != NULL || slots[0] != NULL) return 0;
  *slots[9] = (function)push;
  *slots[11] = (function)pop;
  return 1;
}
