// How a kernel asks for parallel work. All that the isa_*.cpp files see of the pool: they are compiled for one ISA each,
// so they must not instantiate inline functions of the standard library that other files share.
#pragma once

#include <cstddef>

namespace kvtier {

class Pool;
using TaskBody = void (*)(const void* context, int task, float* scratch);

// Calls body(context, task, scratch) for every task below `tasks`, in any order, on any thread, and returns when all are
// done. `scratch` is 64-byte aligned, private to the thread during the call, and at least `scratch_floats` long.
void run_tasks(Pool& pool, int tasks, std::size_t scratch_floats, TaskBody body, const void* context);

template <class Lambda>
void run_tasks(Pool& pool, int tasks, std::size_t scratch_floats, const Lambda& lambda) {
    const TaskBody body = [](const void* context, int task, float* scratch) {
        (*static_cast<const Lambda*>(context))(task, scratch);
    };
    run_tasks(pool, tasks, scratch_floats, body, &lambda);
}

}  // namespace kvtier
