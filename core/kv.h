// KV memory: blocks of 16 tokens in every layer. Owns the memory, its layout and the writing of one token's keys and
// values.
//
// A record holds one block of one KV head in one layer; `size` is the size of a key, or that of a value, padded to 16:
//
//   f32    keys [size][16 tokens],        values [16 tokens][size]
//   bf16   keys [size/2][16 tokens][2],   values [8 token pairs][size][2]
//   int8   keys [size/4][16 tokens][4] u8 (code + 128), values [4 token quads][size][4] u8 (code + 128),
//          then a f16 scale per token for keys [16] and for values [16]
//   fp8    the same with e4m3 numbers for codes
//   int4   keys [size/8][16 tokens][4] u8 (code + 8) whose lower halves are the first four dims and whose upper halves
//          the next four; values [4 token quads][columns/2][16 dims][4] u8 whose lower halves are the dims of an even
//          column of sixteen and whose upper halves those of the next; then scales as int8 has them
//
// No byte has the codes of two tokens, so that threads can write different tokens of a block.
// int8 and int4 keep heads rotated (rotation.h), where their size allows it: an outlier among a head's channels would
// set the step of all others. e4m3 numbers have steps of their own size and gain nothing by it.
//
// Where values are the last dims of keys, they lie there alone, and have the keys' scales. The two parts of such a key
// are rotated apart.
//
// Keys have tokens side by side, so that a query meets 16 tokens at once; values have dims side by side. The pairs and
// quads are what AMX and VNNI multiply.
//
// Layers may have different numbers of heads, and heads of different sizes. The memory holds layer after layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

constexpr int64_t kBlock = 16;  // tokens; also the lanes of the kernels

// Version of the record layout and of the arithmetic that fills it. Raise it when either changes: saved KV of another
// version cannot be used.
constexpr int64_t kKvLayoutVersion = 8;

enum class KvType : int { kF32, kBf16, kInt8, kFp8, kInt4 };

KvType kv_type_from_name(const std::string& name);  // throws std::invalid_argument

struct KvLayout {  // of one layer
  KvType type = KvType::kF32;
  int64_t heads = 0;
  int64_t head_size = 0;  // dims of a key
  int64_t padded_size = 0;
  int64_t value_size = 0;  // dims of a value
  int64_t padded_value_size = 0;
  int64_t values_offset = 0;    // bytes from a record's start
  int64_t scales_offset = 0;    // bytes
  bool values_in_keys = false;  // values are the last dims of keys
  bool rotated = false;         // keys and values: so must queries be, and what attention gives is rotated back
  int64_t value_columns = 0;    // of sixteen dims, where KV memory has codes: an even number of int4
  int64_t record_bytes = 0;
  int64_t block_bytes = 0;  // of all heads

  int64_t first_value() const { return head_size - value_size; }  // dim of a key, where values are there
  const uint16_t* key_scales(const uint8_t* record) const {
    return reinterpret_cast<const uint16_t*>(record + scales_offset);
  }
  const uint16_t* value_scales(const uint8_t* record) const {
    return key_scales(record) + (values_in_keys ? 0 : kBlock);
  }
  bool has_scales() const { return type == KvType::kInt8 || type == KvType::kFp8 || type == KvType::kInt4; }

  // Throws std::invalid_argument on sizes that no model has.
  static KvLayout of(int64_t heads, int64_t head_size, int64_t value_size, KvType type, bool values_in_keys = false);
};

class Kv {
 public:
  Kv(std::vector<KvLayout> layouts, int64_t blocks);
  ~Kv();
  Kv(const Kv&) = delete;
  Kv& operator=(const Kv&) = delete;

  int64_t layers() const { return static_cast<int64_t>(layouts_.size()); }
  const KvLayout& layout(int64_t layer) const { return layouts_[static_cast<size_t>(layer)]; }
  int64_t blocks() const { return blocks_; }
  int64_t block_bytes() const { return block_bytes_; }  // of all layers

  uint8_t* record(int64_t layer, int64_t block, int64_t head) {
    const KvLayout& layout = layouts_[static_cast<size_t>(layer)];
    return data_ + starts_[static_cast<size_t>(layer)] + block * layout.block_bytes + head * layout.record_bytes;
  }

  void copy_block(int64_t source, int64_t target);

  // A block's bytes, layer after layer: block_bytes() of them.
  void read_block(int64_t block, uint8_t* bytes);
  void write_block(int64_t block, const uint8_t* bytes);

 private:
  std::vector<KvLayout> layouts_;
  std::vector<int64_t> starts_;  // bytes before each layer
  int64_t blocks_;
  int64_t block_bytes_ = 0;
  size_t bytes_;
  uint8_t* data_;
};

// Stores one token's key and value (unless it is in the key) of one head into slot 0..15 of a record, rounding to
// nearest.
void write_token(const KvLayout& layout, uint8_t* record, int64_t slot, const float* key, const float* value);

}  // namespace headrace
