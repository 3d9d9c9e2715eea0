// LoRA adapters: low-rank products that some sequences of a step add to a model's products.
//
// Owns an adapter's weights in the order in which the kernels read them. What the kernels do with them is in
// adapters_impl.h, and which row of a step has which adapter is the Model's.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "model.h"

namespace headrace {

// The products of a layer that an adapter may change.
enum class Site : int { kQkv, kOutput, kUp, kDown, kRecurrentIn, kRecurrentOut };
constexpr int kSites = 6;
extern const char* const kSiteNames[kSites];

constexpr int64_t kMostRanks = 4096;  // of all parts of a product together

// A product whose weights int8 would change by more than this, as the ratio of root mean squares, keeps bf16.
constexpr double kMostInt8Error = 0.02;

// Some outputs of a product, with ranks of their own.
struct LowRankPart {
  int64_t outputs = 0;
  int64_t ranks = 0;
  const int32_t* columns = nullptr;  // [outputs]: where each lies among those of the packed product
  const float* up = nullptr;         // [outputs][ranks]
};

class Adapter {
 public:
  // `format`: of weights that are held; kInt8 has a scale for each rank of a side.
  Adapter(const Model& model, LowRankFormat format);
  Adapter(const Adapter&) = delete;
  Adapter& operator=(const Adapter&) = delete;

  // Throws std::invalid_argument where a product does not fit. `down`: [the ranks of all parts, one after the
  // other][inputs]. `magnitudes`: [outputs] factors of what the product and the parts give together, or none.
  void add(int64_t layer, Site site, int64_t inputs, const float* down, const std::vector<LowRankPart>& parts,
           const float* magnitudes);

  const LowRankView* at(int64_t layer, Site site) const;  // or none
  int64_t outputs(int64_t layer, Site site) const;        // of the packed product, 0 where there is none
  bool fits(const Model& model) const { return model_ == &model; }
  int64_t most_ranks() const { return most_ranks_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Held {
    LowRankView view;
    Buffer<uint8_t> down, up;
    Buffer<float> scales, magnitudes;
    std::vector<LowRankPiece> pieces;
    std::vector<int32_t> first_piece;
  };

  const Product* product_at(int64_t layer, Site site) const;

  const Model* model_;
  LowRankFormat format_;
  std::vector<Held> held_;  // [layers][kSites]
  int64_t most_ranks_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace headrace
