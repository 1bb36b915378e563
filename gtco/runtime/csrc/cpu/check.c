/* The part of cpu/features.h that is the same for every CPU. */
#include <stdio.h>

#include "cpu/features.h"

int gtco_missing_features(const char* const* features, int count, char* missing, size_t capacity) {
  int absent = 0;
  size_t used = 0;
  gtco_begin_check();
  missing[0] = '\0';
  for (int i = 0; i < count; ++i) {
    if (gtco_has_feature(features[i])) continue;
    if (used < capacity) {
      int n = snprintf(missing + used, capacity - used, "%s%s", absent ? ", " : "", features[i]);
      if (n > 0) used += (size_t)n;
    }
    ++absent;
  }
  return absent;
}
