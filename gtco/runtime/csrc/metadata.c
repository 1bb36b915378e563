/* The library holds its metadata compressed (zlib, RFC 1950 and 1951). The text is made when somebody first asks. */
#include "metadata.h"

#include <pthread.h>

#include "plan.h"

#define MAX_BITS 15
#define MAX_LITERALS 288
#define MAX_DISTANCES 32

/* The symbols in the order of their codes, and how many codes there are of each number of bits. */
typedef struct {
  uint16_t counts[MAX_BITS + 1], symbols[MAX_LITERALS];
} code_table;

/* Reads bits of `in` from the lowest of each byte on. Behind the end there are zeros, and `bad` is set; it is also set
 * where there is no more room in `out`. */
typedef struct {
  const unsigned char* in;
  char* out;
  int64_t in_bits, at_bit, room, made;
  int bad;
} inflater;

static unsigned bits(inflater* s, int count) {
  unsigned value = 0;
  for (int i = 0; i < count; i++, s->at_bit++) {
    if (s->at_bit >= s->in_bits) {
      s->bad = 1;
      return 0;
    }
    value |= (unsigned)(s->in[s->at_bit >> 3] >> (s->at_bit & 7) & 1) << i;
  }
  return value;
}

static void put(inflater* s, char byte) {
  if (s->made < s->room)
    s->out[s->made++] = byte;
  else
    s->bad = 1;
}

static void make_table(code_table* table, const unsigned char* lengths, int symbols) {
  uint16_t next[MAX_BITS + 2] = {0};
  for (int i = 0; i <= MAX_BITS; i++) table->counts[i] = 0;
  for (int i = 0; i < symbols; i++) table->counts[lengths[i]]++;
  table->counts[0] = 0;
  for (int i = 1; i <= MAX_BITS; i++) next[i + 1] = next[i] + table->counts[i];
  for (int i = 0; i < symbols; i++)
    if (lengths[i]) table->symbols[next[lengths[i]]++] = (uint16_t)i;
}

/* The next symbol. Codes of one length are consecutive numbers, so it is found by counting. */
static int symbol(inflater* s, const code_table* table) {
  int code = 0, first = 0, index = 0;
  for (int length = 1; length <= MAX_BITS; length++) {
    int count = table->counts[length];
    code |= (int)bits(s, 1);
    if (code >= first && code - first < count) return table->symbols[index + code - first];
    index += count;
    first = (first + count) << 1;
    code <<= 1;
  }
  s->bad = 1;
  return 0;
}

static void stored_block(inflater* s) {
  s->at_bit = (s->at_bit + 7) & ~(int64_t)7;
  unsigned length = bits(s, 16);
  bits(s, 16); /* the same, inverted */
  while (length-- && !s->bad) put(s, (char)bits(s, 8));
}

static void compressed_block(inflater* s, const code_table* literals, const code_table* distances) {
  while (!s->bad) {
    int found = symbol(s, literals);
    if (found < 256) {
      put(s, (char)found);
      continue;
    }
    if (found == 256) return;
    if (found > 285) break;
    /* Lengths and distances stand in groups; each group has twice the range of the one before. */
    int group = found - 257, extra = group < 8 || group == 28 ? 0 : (group >> 2) - 1;
    int64_t length = group < 8 ? 3 + group : group == 28 ? 258 : 3 + ((4 + (group & 3)) << extra) + (int)bits(s, extra);
    group = symbol(s, distances);
    if (group > 29) break;
    extra = group < 4 ? 0 : (group >> 1) - 1;
    int64_t back = group < 4 ? 1 + group : 1 + ((2 + (group & 1)) << extra) + (int)bits(s, extra);
    if (back > s->made) break;
    while (length-- && !s->bad) put(s, s->out[s->made - back]);
  }
  s->bad = 1;
}

static void fixed_block(inflater* s) {
  unsigned char lengths[MAX_LITERALS];
  code_table literals, distances;
  for (int i = 0; i < MAX_LITERALS; i++) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
  make_table(&literals, lengths, MAX_LITERALS);
  for (int i = 0; i < MAX_DISTANCES; i++) lengths[i] = 5;
  make_table(&distances, lengths, MAX_DISTANCES);
  compressed_block(s, &literals, &distances);
}

/* A block whose codes stand in front of it, as lengths, which are coded themselves. */
static void dynamic_block(inflater* s) {
  static const unsigned char ORDER[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  unsigned char lengths[MAX_LITERALS + MAX_DISTANCES] = {0};
  code_table literals, distances;
  int num_literals = (int)bits(s, 5) + 257, num_distances = (int)bits(s, 5) + 1, num_lengths = (int)bits(s, 4) + 4;
  if (num_literals > MAX_LITERALS) {
    s->bad = 1;
    return;
  }
  for (int i = 0; i < num_lengths; i++) lengths[ORDER[i]] = (unsigned char)bits(s, 3);
  make_table(&literals, lengths, 19);
  for (int i = 0; i < num_literals + num_distances && !s->bad;) {
    int found = symbol(s, &literals), times = 1;
    unsigned char length = (unsigned char)found;
    if (found == 16) {
      if (i == 0) {
        s->bad = 1;
        return;
      }
      length = lengths[i - 1];
      times = 3 + (int)bits(s, 2);
    } else if (found > 16) {
      length = 0;
      times = found == 17 ? 3 + (int)bits(s, 3) : 11 + (int)bits(s, 7);
    }
    for (; times > 0 && i < num_literals + num_distances; times--) lengths[i++] = length;
  }
  make_table(&literals, lengths, num_literals);
  make_table(&distances, lengths + num_literals, num_distances);
  compressed_block(s, &literals, &distances);
}

/* Makes the whole text; otherwise `bad` is set. */
static void inflate(inflater* s) {
  s->at_bit = 16; /* behind zlib's header */
  for (int last = 0; !last && !s->bad;) {
    last = (int)bits(s, 1);
    switch (bits(s, 2)) {
      case 0: stored_block(s); break;
      case 1: fixed_block(s); break;
      case 2: dynamic_block(s); break;
      default: s->bad = 1;
    }
  }
  if (s->made != s->room) s->bad = 1;
}

static void make_text(void) {
  inflater s = {.in = gtco_the_metadata,
                .in_bits = 8 * gtco_the_metadata_bytes[0],
                .out = gtco_the_metadata_text,
                .room = gtco_the_metadata_bytes[1]};
  inflate(&s);
  if (s.bad) gtco_the_metadata_text[0] = 0; /* the library is damaged */
}

const char* gtco_metadata_text(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_text);
  return gtco_the_metadata_text;
}
