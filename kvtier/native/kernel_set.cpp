#include "kernel_set.hpp"

#include <cstring>
#include <stdexcept>

namespace kvtier {
namespace {

std::vector<const KernelTable*> tables() {
    std::vector<const KernelTable*> found;
#ifdef KVTIER_AMX
    if (few_rows_supported() && amx_kernels()) found.push_back(amx_kernels());
#endif
#ifdef KVTIER_DOT
    if (const KernelTable* table = dot_kernels()) found.push_back(table);
#endif
#ifdef KVTIER_X86
    if (const KernelTable* table = avx512_kernels()) found.push_back(table);
    if (const KernelTable* table = avx2_kernels()) found.push_back(table);
#endif
    found.push_back(plain_kernels());
    return found;
}

const KernelTable& choose(const std::string& isa) {
    for (const KernelTable* table : tables()) {
        if (isa == "auto" || isa == table->isa) return *table;
    }
    throw std::invalid_argument("no kernels for isa \"" + isa + "\" on this CPU");
}

// The products of few rows that go with a set of kernels.
FewRows few_rows_of([[maybe_unused]] const KernelTable& table) {
#ifdef KVTIER_AMX
    if (&table == amx_kernels()) return {FEW_ROWS, few_rows};
#endif
#ifdef KVTIER_DOT
    if (&table == dot_kernels()) return {FEW_ROWS_DOT, few_rows_dot};
#endif
    return {};
}

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : tables()) names.emplace_back(table->isa);
    return names;
}

KernelSet::KernelSet(int threads, const std::string& isa)
    : table_(choose(isa)), few_rows_(few_rows_of(table_)), pool_(threads) {}

void KernelSet::append(const AppendArguments& arguments) const {
    const Rows& rows = arguments.rows;
    const std::size_t item = rows.type == Type::f32 ? 4 : 2, bytes = item * rows.dim;
    for (int token = 0; token < arguments.tokens; ++token) {
        char* plane = reinterpret_cast<char*>(arguments.append_rows[token]) + rows.layer_bytes +
                      bytes * arguments.append_offsets[token];
        const char* k = static_cast<const char*>(arguments.k) + item * token * arguments.k_token_stride;
        const char* v = static_cast<const char*>(arguments.v) + item * token * arguments.v_token_stride;
        for (int head = 0; head < rows.kv_heads; ++head, plane += rows.head_bytes) {
            std::memcpy(plane, k + item * head * arguments.k_head_stride, bytes);
            std::memcpy(plane + rows.value_bytes, v + item * head * arguments.v_head_stride, bytes);
        }
    }
}

Plan KernelSet::plan(const AttendArguments& arguments) const {
    const bool bf16s = arguments.rows.type == Type::bf16 && arguments.q_type == Type::bf16;
    return Plan(arguments, bf16s ? table_.bf16_tile_rows : CONVERTED_ROWS, pool_.threads());
}

void KernelSet::multiply_few(const FewRowsProduct& product) {
    const auto [x, weight, out, rows, in_dim, out_dim, x_stride] = product;
    if (rows < 1 || rows > few_rows_.rows_max || !takes_few(in_dim, out_dim)) {
        throw std::invalid_argument("linear_few takes 1 to few_rows_max rows, in_dim in steps of 32, out_dim of 16");
    }
    const std::size_t lines = std::size_t(few_rows_.rows_max) * in_dim / 32;
    if (packed_.size() < lines) packed_.resize(lines);
    few_rows_.multiply(pool_, {x, weight, out, packed_.data()->values, rows, in_dim, out_dim, x_stride, pool_.threads()});
}

}  // namespace kvtier
