// The cost of a warp's accesses on a GPU: wavefronts of shared memory (those beyond the fewest are
// bank conflicts) and sectors of global memory. The threads of a warp run one after another here.
// So their n-th accesses at one instruction between two meetings of the warp count as one request
// of the warp.
#include <algorithm>

#include "machine.h"

namespace gtco_emulator {

struct Entry {
  uint64_t address;
  uint32_t site;
  uint16_t time;
  uint8_t lane, bytes;
};

static std::vector<Entry> log_of[THREADS_MOST / WARP];
static std::vector<SiteFigures> sites;
static std::vector<uint32_t> table;  // of sites by pc; 0: free, else the site + 1
static std::vector<uint16_t> times[THREADS_MOST / WARP];  // by site and lane
static uint64_t left;

void begin_figures() {
  left = machine->job->sample;
  sites.clear();
  table.assign(4096, 0);
  for (auto& log : log_of) log.clear();
  for (auto& time : times) time.clear();
}

static uint32_t site_of(Kind kind, uint32_t bytes, uint64_t pc) {
  uint32_t slot = static_cast<uint32_t>((pc * 5 + kind) * 0x9e3779b1u) >> 20;
  for (;; slot = (slot + 1) & 4095) {
    if (!table[slot]) {
      if (sites.size() > 2048) fault(pc, 0, "more than 2048 instructions touch memory");
      sites.push_back({pc, kind, bytes, 0, 0, 0});
      table[slot] = static_cast<uint32_t>(sites.size());
    }
    const SiteFigures& site = sites[table[slot] - 1];
    if (site.pc == pc && site.kind == kind && site.bytes == bytes) return table[slot] - 1;
  }
}

void note(Kind kind, uint64_t address, uint32_t bytes, uint64_t pc) {
  if (!left || bytes > 16) return;
  --left;
  const Fibre& self = *machine->running;
  const uint32_t site = site_of(kind, bytes, pc);
  auto& time = times[self.warp];
  if (time.size() < (site + 1) * WARP) time.resize((site + 1) * WARP, 0);
  log_of[self.warp].push_back({address, site, time[site * WARP + self.lane]++,
                               static_cast<uint8_t>(self.lane), static_cast<uint8_t>(bytes)});
}

// For lanes that shared memory serves together: a bank gives one 4-byte word at a time, to all of
// them.
static uint32_t wavefronts(const Entry* begin, const Entry* end) {
  uint32_t words[32][64], counts[32] = {}, most = 0;
  for (const Entry* e = begin; e != end; ++e) {
    const uint32_t first = static_cast<uint32_t>(e->address) / 4;
    const uint32_t last = static_cast<uint32_t>(e->address + e->bytes - 1) / 4;
    for (uint32_t word = first; word <= last; ++word) {
      uint32_t* in = words[word % 32];
      uint32_t& n = counts[word % 32];
      if (std::find(in, in + n, word) == in + n && n < 64) in[n++] = word;
      most = std::max(most, n);
    }
  }
  return most;
}

static void count_shared(SiteFigures& site, const Entry* begin, const Entry* end) {
  // 4 bytes a lane: all at once; 8: halves of a warp; 16: quarters, and of ldmatrix each matrix.
  const int together = site.bytes <= 4 ? 32 : site.bytes <= 8 ? 16 : 8;
  while (begin != end) {
    const Entry* stop = begin;
    while (stop != end && stop->lane / together == begin->lane / together) ++stop;
    site.passes += wavefronts(begin, stop);
    ++site.least;
    begin = stop;
  }
}

static void count_global(SiteFigures& site, const Entry* begin, const Entry* end) {
  uint64_t sectors[64];
  size_t n = 0;
  for (const Entry* e = begin; e != end; ++e) {
    sectors[n++] = e->address / 32;
    if ((e->address + e->bytes - 1) / 32 != e->address / 32) sectors[n++] = e->address / 32 + 1;
  }
  std::sort(sectors, sectors + n);
  site.passes += std::unique(sectors, sectors + n) - sectors;
  // Lanes that read the same bytes request them once.
  std::vector<uint64_t> bytes;
  for (const Entry* e = begin; e != end; ++e) bytes.push_back(e->address);
  std::sort(bytes.begin(), bytes.end());
  const uint64_t different = std::unique(bytes.begin(), bytes.end()) - bytes.begin();
  site.least += (different * site.bytes + 31) / 32;
}

void flush_warp(int warp) {
  auto& log = log_of[warp];
  if (log.empty()) return;
  std::sort(log.begin(), log.end(), [](const Entry& a, const Entry& b) {
    if (a.site != b.site) return a.site < b.site;
    return a.time != b.time ? a.time < b.time : a.lane < b.lane;
  });
  for (size_t i = 0; i < log.size();) {
    size_t j = i;
    while (j < log.size() && log[j].site == log[i].site && log[j].time == log[i].time) ++j;
    SiteFigures& site = sites[log[i].site];
    ++site.requests;
    if (site.kind == GLOBAL_READ || site.kind == GLOBAL_WRITE) {
      count_global(site, &log[i], &log[0] + j);
    } else {
      count_shared(site, &log[i], &log[0] + j);
    }
    i = j;
  }
  log.clear();
  std::fill(times[warp].begin(), times[warp].end(), 0);
}

void end_figures() {
  for (int w = 0; w < THREADS_MOST / WARP; ++w) flush_warp(w);
  Job& job = *machine->job;
  job.sites = static_cast<uint32_t>(std::min<size_t>(sites.size(), job.sites_room));
  std::copy(sites.begin(), sites.begin() + job.sites, job.site);
}

}  // namespace gtco_emulator
