#include "adapters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "numbers.h"

namespace headrace {

const char* const kSiteNames[kSites] = {"qkv", "o", "up", "down", "in", "out"};

namespace {

int8_t int8_code(float value, float step) {
  return step == 0.0f ? int8_t{0} : static_cast<int8_t>(std::clamp(std::nearbyint(value / step), -127.0f, 127.0f));
}

// Lane i of a vector of pairs of bf16 has values i and 16 + i of the run. `step`: of int8, what a code of one means.
void store(uint8_t* run, int64_t place, float value, LowRankFormat format, float step) {
  if (format == LowRankFormat::kF32) {
    std::memcpy(run + place * 4, &value, 4);
  } else if (format == LowRankFormat::kBf16) {
    const uint16_t rounded = bf16_from_f32(value);
    std::memcpy(run + place % 16 * 4 + place / 16 * 2, &rounded, 2);
  } else {
    run[place] = static_cast<uint8_t>(int8_code(value, step));
  }
}

// A side's steps of int8, one for each rank, and what they lose of it.
struct Steps {
  explicit Steps(int64_t ranks) : of_rank(static_cast<size_t>(ranks)) {}

  // Values of one rank, `stride` apart.
  void add(int64_t rank, const float* values, int64_t count, int64_t stride) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(values[i * stride]));
    const float step = of_rank[static_cast<size_t>(rank)] = most / 127.0f;
    for (int64_t i = 0; i < count; ++i) {
      const double value = values[i * stride];
      const double lost = value - double{step} * int8_code(values[i * stride], step);
      squares += value * value;
      lost_squares += lost * lost;
    }
  }
  bool fits() const { return lost_squares <= kMostInt8Error * kMostInt8Error * squares; }

  std::vector<float> of_rank;
  double squares = 0.0, lost_squares = 0.0;
};

}  // namespace

Adapter::Adapter(const Model& model, LowRankFormat format)
    : model_(&model), format_(format), held_(model.weights().layers.size() * kSites) {}

const Product* Adapter::product_at(int64_t layer, Site site) const {
  const std::vector<Layer>& layers = model_->weights().layers;
  if (layer < 0 || layer >= static_cast<int64_t>(layers.size())) return nullptr;
  const Layer& of = layers[static_cast<size_t>(layer)];
  const Product* product = nullptr;
  switch (site) {
    case Site::kQkv:
      product = &of.qkv;
      break;
    case Site::kOutput:
      product = &of.o;
      break;
    case Site::kUp:
      product = &of.mlp.up;
      break;
    case Site::kDown:
      product = &of.mlp.down;
      break;
    case Site::kRecurrentIn:
      product = &of.recurrent_in;
      break;
    case Site::kRecurrentOut:
      product = &of.recurrent_out;
      break;
  }
  return product->present() ? product : nullptr;
}

void Adapter::add(int64_t layer, Site site, int64_t inputs, const float* down, const std::vector<LowRankPart>& parts,
                  const float* magnitudes) {
  const Product* product = product_at(layer, site);
  const std::string name =
      "product '" + std::string(kSiteNames[static_cast<int>(site)]) + "' of layer " + std::to_string(layer);
  if (product == nullptr) throw std::invalid_argument("the model has no " + name);
  const Layout& layout = product->weights.layout;
  if (inputs != layout.inputs) {
    throw std::invalid_argument(name + " has " + std::to_string(layout.inputs) + " inputs, not " +
                                std::to_string(inputs));
  }
  int64_t ranks = 0;
  for (const LowRankPart& part : parts) {
    if (part.ranks < 1) throw std::invalid_argument("a part of " + name + " has no ranks");
    ranks += part.ranks;
    for (int64_t i = 0; i < part.outputs; ++i) {
      if (part.columns[i] < 0 || part.columns[i] >= layout.outputs) {
        throw std::invalid_argument(name + " has no output " + std::to_string(part.columns[i]));
      }
    }
  }
  if (ranks > kMostRanks) throw std::invalid_argument(name + " would have " + std::to_string(ranks) + " ranks");
  Held& held = held_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)];
  if (held.view.down != nullptr) throw std::invalid_argument(name + " is changed twice");

  Steps down_steps(ranks), up_steps(ranks);
  LowRankFormat format = format_;
  if (format == LowRankFormat::kInt8) {
    for (int64_t r = 0; r < ranks; ++r) down_steps.add(r, down + r * inputs, inputs, 1);
    int64_t rank = 0;
    for (const LowRankPart& part : parts) {
      for (int64_t r = 0; r < part.ranks; ++r) up_steps.add(rank++, part.up + r, part.outputs, part.ranks);
    }
    if (!down_steps.fits() || !up_steps.fits()) format = LowRankFormat::kBf16;
  }
  const int64_t size = low_rank_bytes(format);
  const int64_t width = round_up(inputs, 32);
  const int64_t padded_ranks = round_up(ranks, kRanksAtOnce);
  if (format == LowRankFormat::kInt8) {
    held.scales = Buffer<float>(padded_ranks);
    for (size_t r = 0; r < down_steps.of_rank.size(); ++r) {
      held.scales.data()[r] = down_steps.of_rank[r] * up_steps.of_rank[r];
    }
  }
  held.down = Buffer<uint8_t>(std::max<int64_t>(1, padded_ranks) * width * size);
  for (int64_t r = 0; r < ranks; ++r) {
    const float step = down_steps.of_rank[static_cast<size_t>(r)];
    uint8_t* group = held.down.data() + r / kRanksAtOnce * kRanksAtOnce * width * size;
    for (int64_t i = 0; i < inputs; ++i) {
      uint8_t* run = group + (i / 32 * kRanksAtOnce + r % kRanksAtOnce) * 32 * size;
      store(run, i % 32, down[r * inputs + i], format, step);
    }
  }

  // A part's columns by panels, in the order of the panels.
  struct Placed {
    int64_t panel, part, first_rank;
  };
  std::vector<Placed> placed;
  int64_t first_rank = 0;
  int64_t floats = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    std::vector<bool> touched(static_cast<size_t>(layout.panels));
    for (int64_t i = 0; i < parts[p].outputs; ++i) touched[static_cast<size_t>(parts[p].columns[i] / kPanel)] = true;
    for (int64_t panel = 0; panel < layout.panels; ++panel) {
      if (!touched[static_cast<size_t>(panel)]) continue;
      placed.push_back({panel, static_cast<int64_t>(p), first_rank});
      floats += parts[p].ranks * kPanel;
    }
    first_rank += parts[p].ranks;
  }
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) { return a.panel < b.panel; });
  held.up = Buffer<uint8_t>(std::max<int64_t>(1, floats * size));
  held.first_piece.assign(static_cast<size_t>(layout.panels) + 1, 0);
  std::vector<std::vector<int64_t>> at_panel(parts.size());  // where each panel's piece of a part begins
  for (auto& each : at_panel) each.assign(static_cast<size_t>(layout.panels), -1);
  int64_t begin = 0;
  for (const Placed& each : placed) {
    const LowRankPart& part = parts[static_cast<size_t>(each.part)];
    held.pieces.push_back({each.first_rank, part.ranks, held.up.data() + begin * size});
    at_panel[static_cast<size_t>(each.part)][static_cast<size_t>(each.panel)] = begin;
    begin += part.ranks * kPanel;
    ++held.first_piece[static_cast<size_t>(each.panel) + 1];
  }
  for (size_t i = 1; i < held.first_piece.size(); ++i) held.first_piece[i] += held.first_piece[i - 1];
  first_rank = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const LowRankPart& part = parts[p];
    for (int64_t i = 0; i < part.outputs; ++i) {
      const int64_t column = part.columns[i];
      uint8_t* piece = held.up.data() + at_panel[p][static_cast<size_t>(column / kPanel)] * size;
      for (int64_t r = 0; r < part.ranks; ++r) {
        const float step = up_steps.of_rank[static_cast<size_t>(first_rank + r)];
        store(piece + r * kPanel * size, column % kPanel, part.up[i * part.ranks + r], format, step);
      }
    }
    first_rank += part.ranks;
  }
  if (magnitudes != nullptr) {
    held.magnitudes = Buffer<float>(layout.panels * kPanel);
    std::copy(magnitudes, magnitudes + layout.outputs, held.magnitudes.data());
  }
  held.view = {format,
               width,
               padded_ranks,
               held.down.data(),
               held.scales.data(),
               held.pieces.data(),
               held.first_piece.data(),
               held.magnitudes.data()};
  most_ranks_ = std::max(most_ranks_, padded_ranks);
  bytes_ += held.down.bytes() + held.up.bytes() + held.scales.bytes() + held.magnitudes.bytes() +
            static_cast<int64_t>(held.pieces.size() * sizeof(LowRankPiece) + held.first_piece.size() * sizeof(int32_t));
}

int64_t Adapter::outputs(int64_t layer, Site site) const {
  const Product* product = product_at(layer, site);
  return product == nullptr ? 0 : product->weights.layout.outputs;
}

const LowRankView* Adapter::at(int64_t layer, Site site) const {
  const Held& held = held_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)];
  return held.view.down == nullptr ? nullptr : &held.view;
}

void Model::check_adapters(const StepArgs& args) const {
  for (int64_t s = 0; args.slots != nullptr && s < args.sequences; ++s) {
    if (args.slots[s] < -1 || args.slots[s] >= args.adapter_count) {
      throw std::invalid_argument("the step has no adapter " + std::to_string(args.slots[s]));
    }
  }
  for (int64_t i = 0; i < args.adapter_count; ++i) {
    if (!args.adapters[i]->fits(*this)) throw std::invalid_argument("an adapter belongs to another model");
  }
}

// Before a step: room for what its adapters compute of a row. It grows once to what the largest adapter needs.
void Model::ready_adapters(const StepArgs& args) {
  has_adapters_ = false;
  int64_t ranks = 0;
  for (int64_t s = 0; args.slots != nullptr && s < args.sequences; ++s) {
    if (args.slots[s] < 0) continue;
    has_adapters_ = true;
    ranks = std::max(ranks, args.adapters[args.slots[s]]->most_ranks());
  }
  if (!has_adapters_) return;
  const int64_t stride = round_up(std::max<int64_t>(ranks, 1), 16);
  if (stride > low_.stride) {
    low_values_ = Buffer<float>(max_rows_ * stride);
    low_of_row_.resize(static_cast<size_t>(max_rows_));
    low_ = {low_of_row_.data(), low_values_.data(), stride};
  }
}

// What adapters add to a product of the rows that go on, or none.
const LowRank* Model::low_rank(const StepArgs& args, const Layer& layer, Site site, int64_t rows) {
  if (!has_adapters_) return nullptr;
  const int64_t index = &layer - w_.layers.data();
  bool any = false;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = asking_[static_cast<size_t>(r)].source;
    const int32_t slot = args.slots[row_[static_cast<size_t>(source)].sequence];
    const LowRankView* view = slot < 0 ? nullptr : args.adapters[slot]->at(index, site);
    low_of_row_[static_cast<size_t>(r)] = view;
    any = any || view != nullptr;
  }
  return any ? &low_ : nullptr;
}

}  // namespace headrace
