// Row by row: rmsnorm, rotary embedding, gated activation, bias, conversion. Included by isa_*.cpp after tile.hpp.
//
// A row is converted to fp32, computed and stored in an order that depends on its width alone.
#pragma once

namespace kvtier {
namespace {

constexpr long SERIAL_ELEMENTS = 1 << 15;  // waking a thread costs about what this many elements do

// Calls row(i, scratch) for every i below `rows`, in batches over the threads.
template <class Row>
void for_rows(Pool& pool, long rows, long row_elements, long scratch_floats, const Row& row) {
    long batch = larger(1, int(SERIAL_ELEMENTS / row_elements));
    const int tasks = int((rows + batch - 1) / batch);
    const auto body = [&](int task, float* scratch) {
        const long end = task + 1 == tasks ? rows : (task + 1) * batch;
        for (long i = task * batch; i < end; ++i) row(i, scratch);
    };
    run_tasks(pool, tasks, scratch_floats, body);
}

// Calls use(pointer) with `address` as a pointer to elements of `type`.
template <class Use>
inline void with_type(Type type, void* address, const Use& use) {
    switch (type) {
        case Type::f32: return use(static_cast<float*>(address));
        case Type::bf16: return use(static_cast<bf16*>(address));
        case Type::f16: return use(static_cast<f16*>(address));
    }
}

// Calls vector(i, count) for every vector of a row of n elements; count < LANES in the last one only.
template <class Vector>
inline void for_vectors(long n, const Vector& vector) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) vector(i, LANES);
    if (i < n) vector(i, int(n - i));
}

void norm(Pool& pool, const NormArguments& arguments) {
    const long n = arguments.dim;
    const auto row = [&](long i, float* wide) {
        const long x_start = i / arguments.inner * arguments.outer_stride + i % arguments.inner * arguments.inner_stride;
        with_type(arguments.x_type, arguments.x, [&](auto* x) {
            x += x_start;
            if (arguments.update) {
                with_type(arguments.update_type, const_cast<void*>(arguments.update), [&](auto* update) {
                    for_vectors(n, [&](long j, int count) {
                        const Floats sum = Simd::add(Simd::load(x + j, count), Simd::load(update + i * n + j, count));
                        Simd::store(x + j, sum, count);
                    });
                });
            }
            for_vectors(n, [&](long j, int count) { Simd::store(wide + j, Simd::load(x + j, count)); });
        });
        Floats squares = Simd::set(0.0f);
        for (long j = 0; j < n; j += LANES) {
            squares = Simd::fma(Simd::load(wide + j), Simd::load(wide + j), squares);
        }
        const Floats scale = Simd::set(1.0f / __builtin_sqrtf(Simd::sum(squares) / float(n) + arguments.eps));
        with_type(arguments.out_type, arguments.out, [&](auto* out) {
            out += i * n;
            const auto* weight = static_cast<decltype(out)>(const_cast<void*>(arguments.weight));
            for_vectors(n, [&](long j, int count) {  // rounded to the type of out before and after the weight
                Simd::store(out + j, Simd::mul(Simd::load(wide + j), scale), count);
                Simd::store(out + j, Simd::mul(Simd::load(out + j, count), Simd::load(weight + j, count)), count);
            });
        });
    };
    for_rows(pool, arguments.outer * arguments.inner, n, n + LANES, row);
}

void rope(Pool& pool, const RopeArguments& arguments) {
    const long half = arguments.dim / 2;
    const auto token = [&](long i, float*) {
        const float *cos = arguments.cos + i * half, *sin = arguments.sin + i * half;
        with_type(arguments.type, arguments.x, [&](auto* x) {
            for (long head = 0; head < arguments.heads; ++head) {
                auto* left = x + i * arguments.token_stride + head * arguments.head_stride;
                auto* right = left + half;
                for_vectors(half, [&](long j, int count) {
                    const Floats a = Simd::load(left + j, count), b = Simd::load(right + j, count);
                    const Floats c = Simd::load(cos + j, count), s = Simd::load(sin + j, count);
                    Simd::store(left + j, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)), count);
                    Simd::store(right + j, Simd::add(Simd::mul(b, c), Simd::mul(a, s)), count);
                });
            }
        });
    };
    for_rows(pool, arguments.tokens, arguments.heads * arguments.dim, 16, token);
}

void silu_mul(Pool& pool, const SiluArguments& arguments) {
    const Floats one = Simd::set(1.0f), zero = Simd::set(0.0f), lowest = Simd::set(-80.0f);
    const auto token = [&](long i, float*) {
        with_type(arguments.type, arguments.out, [&](auto* out) {
            out += i * arguments.inter;
            const auto* gate = static_cast<decltype(out)>(const_cast<void*>(arguments.gate_up)) + i * arguments.token_stride;
            const auto* up = gate + arguments.inter;
            for_vectors(arguments.inter, [&](long j, int count) {
                const Floats x = Simd::load(gate + j, count);
                const Floats minus_x = Simd::sub(zero, Simd::max(lowest, x));  // e^80 is as good as infinity here
                const Floats silu = Simd::div(x, Simd::add(one, exp(minus_x)));
                Simd::store(out + j, Simd::mul(silu, Simd::load(up + j, count)), count);
            });
        });
    };
    for_rows(pool, arguments.tokens, 4 * arguments.inter, 16, token);  // exp and the division: about four elements' work
}

void add_bias(Pool& pool, const BiasArguments& arguments) {
    const auto row = [&](long i, float*) {
        with_type(arguments.type, arguments.x, [&](auto* x) {
            x += i * arguments.dim;
            const auto* bias = static_cast<decltype(x)>(const_cast<void*>(arguments.bias));
            for_vectors(arguments.dim, [&](long j, int count) {
                Simd::store(x + j, Simd::add(Simd::load(x + j, count), Simd::load(bias + j, count)), count);
            });
        });
    };
    for_rows(pool, arguments.rows, arguments.dim, 16, row);
}

void widen(Pool& pool, const WidenArguments& arguments) {
    const auto row = [&](long i, float*) {
        with_type(arguments.type, const_cast<void*>(arguments.x), [&](const auto* x) {
            x += i * arguments.dim;
            float* out = arguments.out + i * arguments.dim;
            for_vectors(arguments.dim, [&](long j, int count) { Simd::store(out + j, Simd::load(x + j, count), count); });
        });
    };
    for_rows(pool, arguments.rows, arguments.dim, 16, row);
}

}  // namespace
}  // namespace kvtier
