/* pagedkv.h stands alone as C99 without extensions and without a warning. */
#include "pagedkv/pagedkv.h"

#include <stdio.h>
#include <string.h>

/* The ABI: values and sizes that compiled clients rely on. */
typedef char check_status_size[sizeof(pkv_status) == 4 ? 1 : -1];
typedef char check_dtype_size[sizeof(pkv_dtype) == 4 ? 1 : -1];
typedef char check_toggle_size[sizeof(pkv_toggle) == 4 ? 1 : -1];
typedef char check_tensor_size[sizeof(pkv_tensor) == 80 ? 1 : -1];
typedef char check_status_value[PKV_INTERNAL == 9 ? 1 : -1];

int main(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", PKV_VERSION_MAJOR, PKV_VERSION_MINOR, PKV_VERSION_PATCH);
  return strcmp(version, PKV_VERSION_STRING);
}
