"""The list of items of the fused Hopper backward: the header itself, compiled for this machine, and blocks that run it.

A small program gives simulated blocks the items of random problems, in the list's order and with random durations; they
wait and count as the kernel does. It fails where an item is missing or comes twice, finds something undone or another
head's sums in its slot, where nobody can go on, and where numbers are not zero at the end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).resolve().parents[1] / "kernels" / "cuda" / "backward_items.cuh"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
PROGRAM = r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
using std::max;
using std::min;
#define __device__
#define __forceinline__ inline
constexpr int CONSUMERS = 2, BLOCKS_OF_CLUSTER = BLOCKS;
constexpr bool IS_CAUSAL = CAUSAL;
enum Kind { PREPARE, COMPUTE, FINISH };
struct BackwardParams {
  int batch, num_heads, num_kv_heads, q_tiles, k_tiles, heads_per_group, chunks, chunk_tiles, slots;
  int* semaphores;
};
struct Item {
  int kind, head, index;
};
struct Work {
  int batch, kv_head;
  int tiles(const BackwardParams&) const { return 1; }
};
inline void semaphore_wait_least(const int*, int) {}
inline void semaphore_add(int*, int) {}
HEADER
#define CHECK(x)                                          \
  do {                                                    \
    if (!(x)) return printf("line %d: %s\n", __LINE__, #x), 1; \
  } while (0)

struct Block {
  enum { FREE, WAITING, BUSY } state = FREE;
  Item item;
  int left;
};

int main() {
  for (int problem = 0; problem < 300; ++problem) {
    srand(problem);
    BackwardParams p{};
    p.batch = 1 + rand() % 5;
    p.num_kv_heads = 1 + rand() % 40;
    p.k_tiles = 1 + rand() % 20;
    p.chunks = 1 + rand() % 5;
    const int heads = p.batch * p.num_kv_heads, clusters = 1 + rand() % 40;
    p.heads_per_group = rand() % 2 ? 1 + rand() % heads : min(heads, max(1, clusters / p.k_tiles));
    // As few as three groups of heads.
    p.slots = min(heads, 3 * p.heads_per_group + rand() % heads);
    const int items = heads * (p.k_tiles + 2 * p.chunks), of_prepare = done_before(COMPUTE, p);
    const int of_finish = done_before(FINISH, p), each = BLOCKS_OF_CLUSTER;
    std::vector<int> done(heads), finished(heads * p.chunks), prepared(heads), computed(heads), ended(heads);
    std::vector<std::vector<int>> owner(p.slots, std::vector<int>(p.chunks, -1));
    std::vector<Block> blocks(clusters);
    int next = 0, over = 0, still = 0;
    const auto ready = [&](const Item& item) {
      if (item.kind == PREPARE)
        return item.head < p.slots || finished[(item.head - p.slots) * p.chunks + item.index] >= each;
      return done[item.head] >= (item.kind == COMPUTE ? of_prepare : of_finish);
    };
    while (over < items) {
      bool moved = false;
      for (Block& block : blocks) {
        if (rand() % 4 == 0) continue;
        Item& item = block.item;
        std::vector<int>* slot = block.state == Block::FREE ? nullptr : &owner[item.head % p.slots];
        if (block.state == Block::FREE) {
          if (next == items) continue;
          item = fused_item_at(next++, p);
          CHECK(0 <= item.head && item.head < heads && 0 <= item.index);
          CHECK(item.index < (item.kind == COMPUTE ? p.k_tiles : p.chunks));
          block.state = Block::WAITING;
        } else if (block.state == Block::WAITING) {
          if (!ready(item)) continue;
          if (item.kind == PREPARE) {
            if (item.head >= p.slots) {
              int& count = finished[(item.head - p.slots) * p.chunks + item.index];
              count += each;
              CHECK(count == 2 * each);
              count = 0;
            }
            (*slot)[item.index] = item.head;
          }
          block.left = rand() % (item.kind == COMPUTE ? 30 : 5);
          block.state = Block::BUSY;
        } else if (block.left-- == 0) {
          block.state = Block::FREE;
          ++over;
          for (int chunk = 0; chunk < p.chunks; ++chunk)
            CHECK((item.kind != COMPUTE && chunk != item.index) || (*slot)[chunk] == item.head);
          int& count = done[item.head];
          if (item.kind == PREPARE) {
            count += each;
            ++prepared[item.head];
          } else if (item.kind == COMPUTE) {
            CHECK(prepared[item.head] == p.chunks);
            count += each * CONSUMERS;
            ++computed[item.head];
          } else {
            CHECK(computed[item.head] == p.k_tiles);
            if (item.head + p.slots < heads) finished[item.head * p.chunks + item.index] += each;
            count += each;
            ++ended[item.head];
            if (count == of_finish + each * p.chunks) count = 0;
          }
        }
        moved = true;
      }
      still = moved ? 0 : still + 1;
      CHECK(still < 1000);
    }
    for (int count : done) CHECK(count == 0);
    for (int count : finished) CHECK(count == 0);
    for (int head = 0; head < heads; ++head) CHECK(computed[head] == p.k_tiles && ended[head] == p.chunks);
  }
  return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("blocks", [1, 2], ids=["block", "cluster of two"])
@pytest.mark.parametrize("is_causal", [0, 1], ids=["full", "causal"])
def test_items_are_done_once_and_in_order(tmp_path, is_causal, blocks):
    header = re.sub(r"^#.*$", "", HEADER.read_text(), flags=re.MULTILINE)
    source, program = tmp_path / "items.cpp", tmp_path / "items"
    source.write_text(PROGRAM.replace("HEADER", header))
    options = ["-std=c++17", "-O1", f"-DCAUSAL={is_causal}", f"-DBLOCKS={blocks}"]
    subprocess.run([COMPILER, *options, str(source), "-o", str(program)], check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
