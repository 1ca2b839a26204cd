/* Takes a block of a pool on the host, and prints the version of the library. */
#include <pagedkv/pagedkv.h>
#include <stdio.h>

int main(void) {
  pkv_pool_options options = {sizeof options};
  pkv_pool *pool = NULL;
  int32_t block = -1;
  options.block_bytes = 4096;
  options.num_blocks = 4;
  options.device = "host";
  if (pkv_pool_create(&options, &pool) != PKV_OK || pkv_pool_allocate(pool, 1, &block) != PKV_OK) {
    fprintf(stderr, "%s\n", pkv_last_error());
    return 1;
  }
  pkv_pool_destroy(pool);
  printf("%s\n", pkv_version());
  return 0;
}
