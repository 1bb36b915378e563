/* Messages of failures: one buffer in each handle, and one per thread for gtco_open, because it has no handle yet. */
#ifndef GTCO_ERROR_H
#define GTCO_ERROR_H

#include "gtco_api.h"

#define GTCO_MESSAGE_BYTES 1024

/* Formats into buffer (GTCO_MESSAGE_BYTES) and returns status, so that a caller can write `return gtco_fail(...)`. */
gtco_status gtco_fail(char* buffer, gtco_status status, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

/* Keeps text as this thread's last open error; NULL clears it. */
void gtco_set_thread_error(const char* text);
const char* gtco_thread_error(void);

#endif /* GTCO_ERROR_H */
