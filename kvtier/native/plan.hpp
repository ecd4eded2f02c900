// Cuts attention calls over the same queries and lengths into tasks, and owns the memory for partial results of spans that several threads compute.
//
// The cut decides speed only, never bits: every (query, span) pair is computed alike and folded left to right.
#pragma once

#include <memory>
#include <vector>

#include "kernels.hpp"

namespace kvtier {

class Plan {
  public:
    // At most `tile_rows` query rows in a tile, unless one query has more.
    Plan(const AttendArguments& arguments, int tile_rows, int threads);
    // For one call; the last one's is over then.
    AttendTasks view();

  private:
    void cut_queries(const AttendArguments& arguments, int tile_rows);
    void cut_spans(const AttendArguments& arguments, int threads);

    std::vector<Tile> tiles_;
    std::vector<Task> tasks_;
    int tile_rows_max_ = 0;
    std::unique_ptr<float[]> partials_;
};

}  // namespace kvtier
