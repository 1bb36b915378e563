#ifndef GTCO_METADATA_H
#define GTCO_METADATA_H

/* The metadata as JSON; "" if the library is damaged. */
const char* gtco_metadata_text(void);

#endif /* GTCO_METADATA_H */
