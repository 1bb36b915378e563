// Blocks that share something count which of them have done their part. A thread that takes a
// ticket releases its own accesses, and those of its block before the block last met. It acquires
// what earlier takers of the same word released, for itself, and for its block once that has met
// again.
#include <map>

#include "machine.h"

namespace gtco_emulator {

struct Ticket {
  uint32_t block, epoch, taken;  // by the block, without this one
};

static std::map<const void*, std::vector<Ticket>> words;
struct Known {
  const void* word;
  size_t tickets;
  uint32_t epoch;
};
static std::map<uint32_t, std::vector<Known>> knowledge;  // by block

void begin_tickets() { words.clear(), knowledge.clear(); }

uint32_t tickets_taken() {
  const auto found = knowledge.find(machine->block);
  return found == knowledge.end() ? 0 : static_cast<uint32_t>(found->second.size());
}

uint32_t take_ticket(uint32_t* word, uint32_t count) {
  const uint64_t pc = place(__builtin_return_address(0));
  machine->running->pc = pc;
  if (machine->running->thread != 0) fault(pc, 0, "a ticket is for a block's first thread");
  const Buffer& buffer = buffer_of(word, 4, pc, "takes a ticket of");
  if (buffer.writable != COUNTERS && buffer.writable != ANY) {
    fault(pc, 0, "takes a ticket of argument %u, which is not a counter", buffer.number);
  }
  auto& tickets = words[word];
  tickets.push_back({machine->block, machine->epoch, tickets_taken()});
  knowledge[machine->block].push_back({word, tickets.size(), machine->epoch});
  const uint32_t before = *word;
  *word = before >= count - 1 ? 0 : before + 1;
  return before;
}

bool told(uint32_t block, uint32_t thread, uint32_t epoch, uint32_t taken) {
  for (const Known& known : knowledge[machine->block]) {
    if (machine->running->thread != 0 && known.epoch == machine->epoch) continue;
    const auto& tickets = words[known.word];
    for (size_t i = 0; i < known.tickets; ++i) {
      const Ticket& t = tickets[i];
      if (t.block != block || t.taken < taken) continue;
      if (epoch < t.epoch || thread == 0) return true;
    }
  }
  return false;
}

}  // namespace gtco_emulator
