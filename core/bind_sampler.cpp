// The Python class of samplers: checks arguments, releases the GIL and calls the core.
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "pool.h"
#include "sample.h"

using namespace nb::literals;

namespace headrace {
namespace {

// A sampler and the pool that it runs on.
struct BoundSampler {
  std::unique_ptr<Sampler> sampler;
  nb::object pool;
};

// Everything of one call but the logits; each array has an entry a row, the ragged ones an offset more.
void choose(BoundSampler& self, MutableArray<float, 2> logits, Array<float, 2> numbers, Array<int32_t, 2> counts,
            Array<uint64_t, 2> keys, Array<int32_t, 1> seen, Array<int32_t, 1> seen_counts,
            Array<int32_t, 1> seen_offsets, Array<int32_t, 1> bias_tokens, Array<float, 1> biases,
            Array<int32_t, 1> bias_offsets, Array<uint32_t, 2> masks, Array<int32_t, 1> mask_rows,
            MutableArray<int32_t, 1> tokens, MutableArray<float, 1> logprobs, MutableArray<int32_t, 2> top,
            MutableArray<float, 2> top_logprobs, nb::object peaks) {
  const size_t count = logits.shape(0);
  const int64_t vocab = self.sampler->vocab();
  auto agree = [&](bool right, const char* what) {
    if (!right) refuse(std::string(what) + " does not have the shape that the logits ask for");
  };
  agree(static_cast<int64_t>(logits.shape(1)) == vocab, "logits");
  agree(numbers.shape(0) == count && numbers.shape(1) == 6, "numbers");
  agree(counts.shape(0) == count && counts.shape(1) == 2, "counts");
  agree(keys.shape(0) == count && keys.shape(1) == 2, "keys");
  agree(seen_offsets.size() == count + 1 && seen.size() == seen_counts.size(), "seen");
  agree(bias_offsets.size() == count + 1 && bias_tokens.size() == biases.size(), "biases");
  agree(mask_rows.size() == count && static_cast<int64_t>(masks.shape(1)) == (vocab + 31) / 32, "masks");
  agree(tokens.size() == count && logprobs.size() == count, "tokens");
  agree(top.shape(0) == count && top_logprobs.shape(0) == count && top.shape(1) == top_logprobs.shape(1), "top");
  auto check_ragged = [&](const Array<int32_t, 1>& offsets, const Array<int32_t, 1>& entries, const char* what) {
    int64_t at = 0;
    for (size_t i = 0; i <= count; ++i) {
      if (offsets.data()[i] < at || (i == 0 && offsets.data()[0] != 0))
        refuse(std::string(what) + " offsets must ascend");
      at = offsets.data()[i];
    }
    if (at != static_cast<int64_t>(entries.size())) refuse(std::string(what) + " offsets do not cover the entries");
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries.data()[i] < 0 || entries.data()[i] >= vocab)
        refuse(std::string(what) + " token is not in the vocabulary");
    }
  };
  check_ragged(seen_offsets, seen, "seen");
  check_ragged(bias_offsets, bias_tokens, "bias");
  std::vector<SampleRow> rows(count);
  for (size_t i = 0; i < count; ++i) {
    SampleRow& row = rows[i];
    const float* number = numbers.data() + i * 6;
    row.temperature = number[0];
    row.top_p = number[1];
    row.min_p = number[2];
    row.repetition = number[3];
    row.frequency = number[4];
    row.presence = number[5];
    row.top_k = counts.data()[i * 2];
    row.logprobs = counts.data()[i * 2 + 1];
    if (!(row.temperature >= 0.0f) || !(row.repetition > 0.0f) || row.top_k < 0)
      refuse("a sampling number is out of range");
    if (!(row.top_p > 0.0f && row.top_p <= 1.0f) || !(row.min_p >= 0.0f && row.min_p <= 1.0f)) {
      refuse("top_p must be above 0 and at most 1, min_p from 0 to 1");
    }
    if (row.logprobs > static_cast<int64_t>(top.shape(1)) || row.logprobs > vocab)
      refuse("more logprobs than there is room for");
    row.seed = keys.data()[i * 2];
    row.position = keys.data()[i * 2 + 1];
    const int32_t first = seen_offsets.data()[i];
    row.seen_count = seen_offsets.data()[i + 1] - first;
    row.seen = seen.data() + first;
    row.counts = seen_counts.data() + first;
    const int32_t first_bias = bias_offsets.data()[i];
    row.bias_count = bias_offsets.data()[i + 1] - first_bias;
    row.bias_tokens = bias_tokens.data() + first_bias;
    row.biases = biases.data() + first_bias;
    const int32_t mask = mask_rows.data()[i];
    if (mask < -1 || mask >= static_cast<int64_t>(masks.shape(0))) refuse("a mask row does not exist");
    row.mask = mask < 0 ? nullptr : masks.data() + mask * static_cast<int64_t>(masks.shape(1));
  }
  SampleResult result{tokens.data(), logprobs.data(), top.data(), top_logprobs.data(),
                      static_cast<int64_t>(top.shape(1))};
  const auto peaks_array = optional_peaks<Array<float, 2>>(peaks, static_cast<int64_t>(count), self.sampler->blocks());
  const float* peaks_data = peaks.is_none() ? nullptr : peaks_array.data();
  nb::gil_scoped_release free;
  self.sampler->choose(logits.data(), peaks_data, rows, result);
}

}  // namespace

void bind_sampler(nb::module_& module) {
  nb::class_<BoundSampler>(module, "Sampler")
      .def(
          "__init__",
          [](BoundSampler* self, int64_t vocab, nb::object pool, const std::string& isa) {
            auto sampler = std::make_unique<Sampler>(vocab, nb::cast<Pool&>(pool), kernels_of(isa));
            new (self) BoundSampler{std::move(sampler), std::move(pool)};
          },
          "vocab"_a, "pool"_a, "isa"_a)
      .def("choose", &choose, "logits"_a.noconvert(), "numbers"_a.noconvert(), "counts"_a.noconvert(),
           "keys"_a.noconvert(), "seen"_a.noconvert(), "seen_counts"_a.noconvert(), "seen_offsets"_a.noconvert(),
           "bias_tokens"_a.noconvert(), "biases"_a.noconvert(), "bias_offsets"_a.noconvert(), "masks"_a.noconvert(),
           "mask_rows"_a.noconvert(), "tokens"_a.noconvert(), "logprobs"_a.noconvert(), "top"_a.noconvert(),
           "top_logprobs"_a.noconvert(), "peaks"_a = nb::none());
}

}  // namespace headrace
