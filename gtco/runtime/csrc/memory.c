/* memcpy and memset for the kernels. The linker puts them beside the kernels (kernels_begin.c), so a call can also be
 * ended while it is in them. The system's own stand elsewhere. */
#include "restart_frame.h"

#ifdef GTCO_RESTARTS
#include <emmintrin.h> /* calls can be ended on x86-64 alone */
#include <stddef.h>

/* Without it a compiler may see that the loop is a memcpy and call the function itself. */
#define KEEP_LOOP __asm__ volatile("" ::: "memory")
#define INSIDE __attribute__((visibility("hidden")))

INSIDE void* memcpy(void* restrict to, const void* restrict from, size_t bytes) {
  char* p = to;
  const char* q = from;
  if (bytes < 16) {
    for (size_t i = 0; i < bytes; ++i) {
      p[i] = q[i];
      KEEP_LOOP;
    }
    return to;
  }
  const __m128i last = _mm_loadu_si128((const __m128i*)(q + bytes - 16));
  for (size_t i = 0; i + 16 < bytes; i += 16) {
    _mm_storeu_si128((__m128i*)(p + i), _mm_loadu_si128((const __m128i*)(q + i)));
    KEEP_LOOP;
  }
  _mm_storeu_si128((__m128i*)(p + bytes - 16), last);
  return to;
}

INSIDE void* memset(void* to, int value, size_t bytes) {
  char* p = to;
  if (bytes < 16) {
    for (size_t i = 0; i < bytes; ++i) {
      p[i] = (char)value;
      KEEP_LOOP;
    }
    return to;
  }
  const __m128i values = _mm_set1_epi8((char)value);
  for (size_t i = 0; i + 16 < bytes; i += 16) {
    _mm_storeu_si128((__m128i*)(p + i), values);
    KEEP_LOOP;
  }
  _mm_storeu_si128((__m128i*)(p + bytes - 16), values);
  return to;
}
#endif
