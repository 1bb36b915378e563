/* Reads cases from the standard input: bytes of the compressed text (8), bytes of the text (8), the compressed text.
 * Writes for each: 1 and the text, or 0. Its buffers are as large as needed, so that the sanitizer sees any access
 * beside them. */
#include <stdio.h>
#include <stdlib.h>

#include "metadata.c"

const unsigned char gtco_the_metadata[1];
const int64_t gtco_the_metadata_bytes[2];
char gtco_the_metadata_text[1];

int main(void) {
  int64_t sizes[2];
  while (fread(sizes, sizeof sizes, 1, stdin) == 1) {
    unsigned char* in = malloc((size_t)sizes[0]);
    char* out = malloc((size_t)sizes[1]);
    if (fread(in, 1, (size_t)sizes[0], stdin) != (size_t)sizes[0]) return 1;
    inflater s = {.in = in, .in_bits = 8 * sizes[0], .out = out, .room = sizes[1]};
    inflate(&s);
    putchar(!s.bad);
    if (!s.bad) fwrite(out, 1, (size_t)sizes[1], stdout);
    free(in);
    free(out);
  }
  return 0;
}
