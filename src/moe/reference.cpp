// docs/NUMERICS.md as code. Real is float (the contract, operation by operation) or double (the oracle: sums,
// activation and combine in double, the contract's rounding points kept).
#include "moe/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/quantize.hpp"
#include "moe/activations.hpp"
#include "moe/parallel.hpp"
#include "moe/scalar_lane.hpp"
#include "moe/scales.hpp"

namespace moe4::moe {

namespace {

constexpr auto kBlock = static_cast<std::size_t>(kNvfp4BlockSize);

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
double multiply_add(double a, double b, double c) { return a * b + c; }

float activate(float gate, float up) { return Silu::apply(ScalarLane{gate}, ScalarLane{up}).value; }
double activate(double gate, double up) { return gate / (1.0 + std::exp(-gate)) * up; }

/// What overflows in the contract does so in the oracle too, and is then nobody's error but the weights'.
float with_fp32_range(float x) { return x; }
double with_fp32_range(double x) {
    return std::fabs(x) > static_cast<double>(std::numeric_limits<float>::max())
               ? std::copysign(std::numeric_limits<double>::infinity(), x)
               : x;
}

std::uint16_t to_bf16(float x) { return format::bf16_from_float(x); }
std::uint16_t to_bf16(double x) { return format::bf16_from_double(x); }

/// A row as it meets the other operand: the values of block k / 16 are codes that share a scale. bf16
/// activations are codes whose scales are 1.
template <class Real>
struct Row {
    std::vector<Real> codes;
    std::vector<Real> scales;
    explicit Row(std::size_t size) : codes(size), scales(size / kBlock, Real{1}) {}
};

template <class Real>
Row<Real> weight_row(const Nvfp4View& matrix, std::int64_t n) {
    Row<Real> row(index(matrix.cols));
    const std::uint8_t* packed = matrix.packed + n * matrix.packed_stride;
    for (std::size_t k = 0; k < row.codes.size(); ++k) {
        row.codes[k] = format::e2m1_decode(static_cast<std::uint8_t>(packed[k / 2] >> (k % 2 * 4)));
    }
    const std::uint8_t* scales = matrix.block_scale + n * matrix.scale_stride;
    std::transform(scales, scales + row.scales.size(), row.scales.begin(), format::e4m3_decode);
    return row;
}

template <class Real>
Row<Real> bf16_row(std::span<const std::uint16_t> x) {
    Row<Real> row(x.size());
    std::transform(x.begin(), x.end(), row.codes.begin(), format::bf16_to_float);
    return row;
}

template <class Real>
Row<Real> quantized_row(std::span<const std::uint16_t> x, float global_scale) {
    Row<Real> row(x.size());
    float block[kBlock];
    std::uint8_t codes[kBlock];
    for (std::size_t b = 0; b < row.scales.size(); ++b) {
        std::transform(&x[b * kBlock], &x[b * kBlock] + kBlock, block, format::bf16_to_float);
        row.scales[b] = format::e4m3_decode(format::quantize_activation_block(block, global_scale, codes));
        std::transform(codes, codes + kBlock, &row.codes[b * kBlock], format::e2m1_decode);
    }
    return row;
}

/// w4a4: one exact integer dot a block, one multiply-add a block, in ascending order.
float block_dot(const Row<float>& x, const Row<float>& w) {
    float sum = 0;
    for (std::size_t b = 0; b < w.scales.size(); ++b) {
        float dot = 0;  // at most 576 in quarters: exact
        for (std::size_t k = b * kBlock; k < (b + 1) * kBlock; ++k) dot += x.codes[k] * w.codes[k];
        sum = multiply_add(x.scales[b] * w.scales[b], dot, sum);
    }
    return sum;
}

/// The unit of SumOrder::fixed_blocks, NaN where a value is not finite.
float fixed_point_unit(const float* block) {
    float largest = 0;
    for (std::size_t k = 0; k < kBlock; ++k) {
        if (!std::isfinite(block[k])) return std::numeric_limits<float>::quiet_NaN();
        largest = std::max(largest, std::fabs(block[k]));
    }
    float unit = 0x1p-126F;
    while (largest > unit * 127 * 65536) unit *= 2;
    return unit;
}

/// w4a16: the sum of bf16 activations times exact weights, code * scale, in one of the stated orders.
float value_dot(const Row<float>& x, const Row<float>& w, SumOrder order) {
    const auto add_product = [&](std::size_t k, float sum) {
        return multiply_add(x.codes[k], w.codes[k] * w.scales[k / kBlock], sum);
    };
    const std::size_t size = w.codes.size();
    const auto distance = static_cast<std::size_t>(order.pair_distance);
    const auto first_of_pair = [=](std::size_t p) { return p / distance * 2 * distance + p % distance; };
    float sum = 0;
    switch (order.kind) {
        case SumOrder::plain:
            for (std::size_t k = 0; k < size; ++k) sum = add_product(k, sum);
            break;
        case SumOrder::second_then_first:
            for (std::size_t p = 0; p < size / 2; ++p) {
                sum = add_product(first_of_pair(p), add_product(first_of_pair(p) + distance, sum));
            }
            break;
        case SumOrder::scaled_blocks: {
            const auto add_code = [&](std::size_t k, float dot) {
                return multiply_add(x.codes[k], w.codes[k] * 0x1p-7F, dot);
            };
            for (std::size_t block = 0; block < size / kBlock; ++block) {
                float dot = 0;
                for (std::size_t p = block * kBlock / 2; p < (block + 1) * kBlock / 2; ++p)
                    dot = add_code(first_of_pair(p), add_code(first_of_pair(p) + distance, dot));
                sum = multiply_add(dot, w.scales[block] * 0x1p7F, sum);
            }
            break;
        }
        case SumOrder::fixed_blocks:
            for (std::size_t block = 0; block < size / kBlock; ++block) {
                const float unit = fixed_point_unit(&x.codes[block * kBlock]);
                double dot = 0;  // exact
                for (std::size_t k = block * kBlock; k < (block + 1) * kBlock; ++k)
                    dot += std::nearbyint(double{x.codes[k]} / double{unit}) * double{w.codes[k]};
                sum = multiply_add(static_cast<float>(dot), w.scales[block] * unit, sum);
            }
            break;
        case SumOrder::two_chains:
            for (std::size_t group = 0; group < size / 2; group += 16) {
                float firsts = 0;
                float seconds = 0;
                for (std::size_t p = group; p < std::min(group + 16, size / 2); ++p) {
                    firsts = add_product(first_of_pair(p), firsts);
                    seconds = add_product(first_of_pair(p) + distance, seconds);
                }
                sum += firsts + seconds;
            }
            break;
    }
    return sum;
}

/// The oracle's rows carry their scales inside the codes (`fold_scales`), and its order does not matter.
double oracle_dot(const Row<double>& x, const Row<double>& w) {
    double sums[kBlock] = {};
    for (std::size_t k = 0; k < w.codes.size(); k += kBlock) {
        for (std::size_t i = 0; i < kBlock; ++i) sums[i] += x.codes[k + i] * w.codes[k + i];
    }
    double sum = 0;
    for (const double part : sums) sum += part;
    return sum;
}

void fold_scales(Row<double>& row) {
    for (std::size_t k = 0; k < row.codes.size(); ++k) row.codes[k] *= row.scales[k / kBlock];
}
void fold_scales(Row<float>&) {}  // the contract multiplies them into the sums

float dot(const ReferenceProblem& problem, const Row<float>& x, const Row<float>& w) {
    return problem.precision == Precision::w4a4 ? block_dot(x, w) : value_dot(x, w, problem.order);
}
double dot(const ReferenceProblem&, const Row<double>& x, const Row<double>& w) { return oracle_dot(x, w); }

float largest_finite(std::span<const std::uint16_t> x) {
    float largest = 0;
    for (const std::uint16_t bits : x) {
        const float magnitude = std::fabs(format::bf16_to_float(bits));
        if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
    }
    return largest;
}

/// A slot that a held expert serves: which token, which of its top_k, and what it computes.
template <class Real>
struct Slot {
    std::int64_t token = 0;
    std::int64_t position = 0;  // token * top_k + j
    std::vector<std::uint16_t> h;
    std::vector<Real> y;
};

template <class Real>
class Computation {
public:
    Computation(const MoeWeights& weights, const ReferenceProblem& problem, const ReferenceInput& input)
        : weights_(weights),
          problem_(problem),
          input_(input),
          held_(held_experts(problem.experts, static_cast<int>(weights.experts.size()))),
          slots_(weights.experts.size()) {
        if (problem.precision == Precision::w4a4) scales_ = input_scales(weights, problem.activation_scale);
        check_weights(weights, problem.experts);
        batch_amax_ = largest_finite(input.hidden);
        for (std::int64_t position = 0; position < input.num_tokens * input.top_k; ++position) {
            const std::int32_t id = input.top_k_ids[index(position)];
            if (held_.contains(id)) {
                slots_[index(id)].push_back(
                    {.token = position / input.top_k, .position = position, .h = {}, .y = {}});
            }
        }
    }

    HeldExperts held() const { return held_; }

    void gate_up(int expert) {
        const ExpertWeights& w = weights_.experts[index(expert)];
        auto& slots = slots_[index(expert)];
        std::vector<Row<Real>> rows;
        std::vector<float> activation_scales;
        for (auto& slot : slots) {
            const auto x = input_.hidden.subspan(index(slot.token * hidden_size()), index(hidden_size()));
            activation_scales.push_back(activation_scale(expert, Projection::gate, x, batch_amax_));
            rows.push_back(activation_row(x, activation_scales.back()));
            slot.h.resize(index(weights_.config.intermediate_size));
        }
        if (slots.empty()) return;
        for (std::int64_t n = 0; n < weights_.config.intermediate_size; ++n) {
            const auto gate_row = prepared_weight_row(w.gate.weight, n);
            const auto up_row = prepared_weight_row(w.up.weight, n);
            for (std::size_t i = 0; i < slots.size(); ++i) {
                const Real gate =
                    scaled_dot(rows[i], gate_row, activation_scales[i], w.gate.weight.global_scale);
                const Real up = scaled_dot(rows[i], up_row, activation_scales[i], w.up.weight.global_scale);
                slots[i].h[index(n)] = to_bf16(activate(gate, up));
            }
        }
    }

    /// Between the two: the batch's largest h, which only `dynamic` reads.
    void finish_gate_up() {
        h_batch_amax_ = 0;
        for (const auto& slots : slots_) {
            for (const auto& slot : slots) h_batch_amax_ = std::max(h_batch_amax_, largest_finite(slot.h));
        }
    }

    void down(int expert) {
        const ExpertMatrix& w = weights_.experts[index(expert)].down;
        auto& slots = slots_[index(expert)];
        std::vector<Row<Real>> rows;
        std::vector<float> activation_scales;
        for (auto& slot : slots) {
            activation_scales.push_back(activation_scale(expert, Projection::down, slot.h, h_batch_amax_));
            rows.push_back(activation_row(slot.h, activation_scales.back()));
            slot.y.resize(index(hidden_size()));
        }
        if (slots.empty()) return;
        for (std::int64_t n = 0; n < hidden_size(); ++n) {
            const auto row = prepared_weight_row(w.weight, n);
            for (std::size_t i = 0; i < slots.size(); ++i) {
                slots[i].y[index(n)] = scaled_dot(rows[i], row, activation_scales[i], w.weight.global_scale);
            }
        }
    }

    std::vector<Real> combine() const {
        std::vector<const Slot<Real>*> by_position(index(input_.num_tokens * input_.top_k), nullptr);
        for (const auto& slots : slots_) {
            for (const auto& slot : slots) by_position[index(slot.position)] = &slot;
        }
        std::vector<Real> output(index(input_.num_tokens * hidden_size()), Real{0});
        for (std::size_t position = 0; position < by_position.size(); ++position) {
            if (by_position[position] == nullptr) continue;  // adds exactly 0, whatever its weight
            const Slot<Real>& slot = *by_position[position];
            const Real weight = input_.top_k_weights[position];
            Real* out = &output[index(slot.token * hidden_size())];
            for (std::size_t n = 0; n < slot.y.size(); ++n) out[n] = multiply_add(weight, slot.y[n], out[n]);
        }
        return output;
    }

private:
    std::int64_t hidden_size() const { return weights_.config.hidden_size; }

    float activation_scale(int expert, Projection projection, std::span<const std::uint16_t> x,
                           float batch_amax) const {
        if (problem_.precision == Precision::w4a16) return 1.0F;
        switch (problem_.activation_scale) {
            case ActivationScale::dynamic:
                return format::dynamic_global_scale(batch_amax);
            case ActivationScale::dynamic_token:
                return format::dynamic_global_scale(largest_finite(x));
            default:
                break;
        }
        const InputScales& scales = scales_[index(expert)];
        return projection == Projection::down ? scales.down : scales.gate_up;
    }

    Row<Real> activation_row(std::span<const std::uint16_t> x, float scale) const {
        auto row = problem_.precision == Precision::w4a4 ? quantized_row<Real>(x, scale) : bf16_row<Real>(x);
        fold_scales(row);
        return row;
    }

    Row<Real> prepared_weight_row(const Nvfp4View& matrix, std::int64_t n) const {
        auto row = weight_row<Real>(matrix, n);
        fold_scales(row);
        return row;
    }

    /// The product of the two global scales is formed in double; the contract rounds it once.
    Real scaled_dot(const Row<Real>& x, const Row<Real>& w, float activation_scale,
                    double global_scale) const {
        const auto scale = static_cast<Real>(static_cast<double>(activation_scale) * global_scale);
        return with_fp32_range(with_fp32_range(scale) * dot(problem_, x, w));
    }

    const MoeWeights& weights_;
    const ReferenceProblem& problem_;
    const ReferenceInput& input_;
    HeldExperts held_;
    std::vector<InputScales> scales_;
    std::vector<std::vector<Slot<Real>>> slots_;  // [num_experts]
    float batch_amax_ = 0;
    float h_batch_amax_ = 0;
};

template <class Body>
void for_each_expert(HeldExperts held, const ParallelFor& parallel_for, Body body) {
    parallel(parallel_for, held.count(), [&](int i) { body(held.first + i); });
}

}  // namespace

std::vector<float> reference_layer(const MoeWeights& weights, const ReferenceProblem& problem,
                                   const ReferenceInput& input) {
    Computation<float> layer(weights, problem, input);
    for_each_expert(layer.held(), {}, [&](int expert) { layer.gate_up(expert); });
    layer.finish_gate_up();
    for_each_expert(layer.held(), {}, [&](int expert) { layer.down(expert); });
    return layer.combine();
}

std::vector<double> oracle_layer(const MoeWeights& weights, const ReferenceProblem& problem,
                                 const ReferenceInput& input, const ParallelFor& parallel_for,
                                 const std::function<void(int, int)>& progress) {
    Computation<double> layer(weights, problem, input);
    std::mutex reporting;
    int done = 0;
    const int total = 2 * (layer.held().last - layer.held().first);
    const auto step = [&] {
        const std::lock_guard lock(reporting);
        ++done;
        if (progress) progress(done, total);
    };
    for_each_expert(layer.held(), parallel_for, [&](int expert) { layer.gate_up(expert), step(); });
    layer.finish_gate_up();
    for_each_expert(layer.held(), parallel_for, [&](int expert) { layer.down(expert), step(); });
    return layer.combine();
}

}  // namespace moe4::moe
