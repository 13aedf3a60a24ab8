#include "verdict/weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "format/bf16.hpp"
#include "moe/parallel.hpp"
#include "moe4/error.hpp"
#include "verdict/distance.hpp"

namespace moe4::verdict {

namespace {

constexpr std::size_t kNumProjections = std::size(kProjections);
constexpr std::size_t kNumWorst = 8;

const Nvfp4View& matrix_of(const MoeWeights& weights, int expert, Projection projection) {
    return weights.experts[static_cast<std::size_t>(expert)][projection].weight;
}

NamedTensor checked_reference(const MoeWeights& weights, int expert, Projection projection,
                              const Reference& reference) {
    const Nvfp4View& matrix = matrix_of(weights, expert, projection);
    NamedTensor named = reference(expert, projection);
    const TensorView& tensor = named.tensor;
    const Shape expected{matrix.rows, matrix.cols};
    const bool is_float =
        tensor.dtype == DType::bf16 || tensor.dtype == DType::f16 || tensor.dtype == DType::f32;
    if (is_float && tensor.shape == expected) return named;
    throw Error(ErrorKind::invalid_argument,
                named.name + " is " + std::string(dtype_name(tensor.dtype)) + " " + tensor.shape.to_string() +
                    ", expected BF16, F16 or F32 " + expected.to_string() + " as the reference of " +
                    moe::tensor_name(weights, expert, projection, weights.leaves.packed));
}

void read_row(const TensorView& tensor, std::int64_t row, std::vector<float>& out) {
    const std::size_t row_bytes = out.size() * static_cast<std::size_t>(dtype_bits(tensor.dtype)) / 8;
    const auto* bytes =
        static_cast<const std::byte*>(tensor.data) + static_cast<std::size_t>(row) * row_bytes;
    if (tensor.dtype == DType::f32) {
        std::memcpy(out.data(), bytes, row_bytes);
        return;
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, bytes + 2 * i, 2);
        out[i] = tensor.dtype == DType::bf16 ? format::bf16_to_float(bits) : format::f16_to_float(bits);
    }
}

void check_finite(const std::vector<float>& values, std::int64_t row, const std::string& name) {
    const auto bad = std::find_if_not(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
    if (bad == values.end()) return;
    throw Error(ErrorKind::broken_file, name + " holds " + (std::isnan(*bad) ? "NaN" : "an infinity") +
                                            " at row " + std::to_string(row) + ", column " +
                                            std::to_string(bad - values.begin()) +
                                            ", expected finite numbers");
}

/// Row by row: a matrix in f32 is never in memory whole.
DistanceSums compare(const Nvfp4View& matrix, const NamedTensor& reference) {
    std::vector<float> found(static_cast<std::size_t>(matrix.cols));
    std::vector<float> expected(found.size());
    DistanceSums sums;
    Nvfp4View one_row = matrix;
    one_row.rows = 1;
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        dequantize(one_row, found.data());
        read_row(reference.tensor, row, expected);
        check_finite(expected, row, reference.name);
        for (std::size_t i = 0; i < found.size(); ++i) {
            sums.add(static_cast<double>(found[i]), static_cast<double>(expected[i]));
        }
        one_row.packed += matrix.packed_stride;
        one_row.block_scale += matrix.scale_stride;
    }
    return sums;
}

/// The matrix with some of its bytes rearranged.
struct Reread {
    std::vector<std::uint8_t> bytes;
    Nvfp4View view;
};

Reread with_nibbles_swapped(const Nvfp4View& matrix) {
    Reread result{{}, matrix};
    const std::int64_t row_bytes = matrix.cols / 2;
    result.bytes.reserve(static_cast<std::size_t>(matrix.rows * row_bytes));
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::uint8_t* packed = matrix.packed + row * matrix.packed_stride;
        std::transform(packed, packed + row_bytes, std::back_inserter(result.bytes),
                       [](std::uint8_t byte) { return static_cast<std::uint8_t>(byte >> 4 | byte << 4); });
    }
    result.view.packed = result.bytes.data();
    result.view.packed_stride = row_bytes;
    return result;
}

/// Defined where the swizzled layout has no padding, so that both have the same size.
Reread with_scales_unswizzled(const Nvfp4View& matrix) {
    Reread result{{}, matrix};
    const std::int64_t num_blocks = matrix.cols / kNvfp4BlockSize;
    std::vector<std::uint8_t> as_stored;
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::uint8_t* scales = matrix.block_scale + row * matrix.scale_stride;
        as_stored.insert(as_stored.end(), scales, scales + num_blocks);
    }
    if (swizzled_scale_bytes(matrix.rows, num_blocks) != as_stored.size()) return result;
    result.bytes.resize(as_stored.size());
    unswizzle_scales(as_stored.data(), matrix.rows, num_blocks, result.bytes.data());
    result.view.block_scale = result.bytes.data();
    result.view.scale_stride = num_blocks;
    return result;
}

std::string factor_text(double factor) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", factor);
    return text;
}

}  // namespace

LayertestReport::Weights compare_weights(const MoeWeights& weights, const moe::HeldExperts& held,
                                         const Reference& reference, const LayertestLimits& limits,
                                         const ParallelFor& parallel_for, const std::function<void()>& step) {
    struct Matrix {
        int expert;
        Projection projection;
        NamedTensor reference;
        DistanceSums sums;
    };
    std::vector<Matrix> matrices;
    for (int expert = held.first; expert < held.last; ++expert) {
        for (const Projection projection : kProjections) {
            matrices.push_back(
                {expert, projection, checked_reference(weights, expert, projection, reference), {}});
        }
    }

    std::mutex stepping;
    const auto compare_one = [&](int i) {
        Matrix& matrix = matrices[static_cast<std::size_t>(i)];
        matrix.sums = compare(matrix_of(weights, matrix.expert, matrix.projection), matrix.reference);
        const std::lock_guard lock(stepping);
        step();
    };
    moe::parallel(parallel_for, static_cast<int>(matrices.size()), compare_one);

    LayertestReport::Weights result;
    DistanceSums overall;
    DistanceSums by_projection[kNumProjections];
    for (const Matrix& matrix : matrices) {
        overall.add(matrix.sums);
        by_projection[static_cast<std::size_t>(matrix.projection)].add(matrix.sums);
        const Distance distance = matrix.sums.distance();
        result.worst.push_back({matrix.expert, matrix.projection, distance});
        ++result.matrices;
        if (!(distance.rel_l2 <= limits.weight_rel_l2)) ++result.matrices_over_limit;
        if (!(distance.rel_l2 <= limits.other_layer_rel_l2)) ++result.matrices_of_another;
    }
    result.overall = overall.distance();
    for (std::size_t p = 0; p < kNumProjections; ++p) result.by_projection[p] = by_projection[p].distance();
    std::stable_sort(result.worst.begin(), result.worst.end(),
                     [](const auto& a, const auto& b) { return a.distance.rel_l2 > b.distance.rel_l2; });
    result.worst.resize(std::min(result.worst.size(), kNumWorst));
    return result;
}

std::string explain_matrix(const MoeWeights& weights, const MatrixDistance& worst, const Reference& reference,
                           double limit) {
    const Nvfp4View& matrix = matrix_of(weights, worst.expert, worst.projection);
    const NamedTensor own = reference(worst.expert, worst.projection);
    const auto fits = [&](const Nvfp4View& view, const NamedTensor& tensor) {
        return compare(view, tensor).distance().rel_l2 <= limit;
    };

    const DistanceSums sums = compare(matrix, own);
    const bool is_scaled = sums.best_factor() > 1.2 || (sums.best_factor() > 0.0 && sums.best_factor() < 0.8);
    if (std::isfinite(worst.distance.rel_l2) && is_scaled && sums.rel_l2_of_best_fit() <= limit) {
        return "it is " + factor_text(sums.best_factor()) + " times its reference, as a wrong " +
               weights.leaves.global_scale + " makes it";
    }
    if (worst.projection != Projection::down) {
        const Projection other = worst.projection == Projection::gate ? Projection::up : Projection::gate;
        if (fits(matrix, reference(worst.expert, other))) {
            return "it fits the reference's " + std::string(moe::projection_name(other)) +
                   ": gate and up are swapped";
        }
    }
    if (fits(with_nibbles_swapped(matrix).view, own)) {
        return "it fits with the two nibbles of every byte swapped";
    }
    if (fits(with_scales_unswizzled(matrix).view, own)) {
        return "it fits with its block scales read in the swizzled 128x4 order";
    }
    return "";
}

}  // namespace moe4::verdict
