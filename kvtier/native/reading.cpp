#include "reading.hpp"

#include <vector>

#include "tasks.hpp"
#include "pool.hpp"

namespace kvtier {
namespace {

// A core that reads in order waits for more lines than one that reads several runs in turn (docs/LOG.md).
constexpr std::size_t RUNS = 8;
constexpr std::size_t TURN = 4096 / sizeof(std::uint64_t);

struct alignas(64) Sum {
    std::uint64_t value = 0;
};

std::uint64_t sum_of(const std::uint64_t* words, std::size_t count) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += words[i];
    return sum;
}

std::uint64_t sum_in_turns(const std::uint64_t* words, std::size_t count) {
    const std::size_t run = count / RUNS / TURN * TURN;
    std::uint64_t sum = sum_of(words + RUNS * run, count - RUNS * run);
    for (std::size_t place = 0; place < run; place += TURN) {
        for (std::size_t i = 0; i < RUNS; ++i) sum += sum_of(words + i * run + place, TURN);
    }
    return sum;
}

}  // namespace

std::uint64_t read_memory(Pool& pool, const std::uint64_t* memory, std::size_t bytes) {
    const std::size_t count = bytes / sizeof(std::uint64_t), tasks = std::size_t(pool.threads());
    std::vector<Sum> sums(tasks);
    run_tasks(pool, int(tasks), 0, [&](int task, float*) {
        const std::size_t start = count * std::size_t(task) / tasks, end = count * std::size_t(task + 1) / tasks;
        sums[std::size_t(task)].value = sum_in_turns(memory + start, end - start);
    });
    std::uint64_t sum = 0;
    for (const Sum& one : sums) sum += one.value;
    return sum;
}

}  // namespace kvtier
