// Computes AMX and AVX512_BF16 instructions on a processor that lacks them, so that the kernels' own machine code can
// be tested there. A library to preload: it takes the signal of an unknown instruction, decodes the instruction,
// computes its result as Intel's manual defines it and goes on behind it. Needs AVX-512 for the registers, and Linux.
//
// Shapes of tiles are checked as the processor checks them: what would fault there ends the process here. Vectors are
// computed in the form that the kernels use: 64 bytes, without masks.
#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kTileRows = 16, kTileBytes = 64;

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

thread_local TileConfig config;  // of palette 0 where none is loaded
alignas(64) thread_local uint8_t tiles[kTiles][kTileRows][kTileBytes];

[[noreturn]] void fault(const char* why) {
  char line[160];
  const int length = snprintf(line, sizeof line, "missing_instructions: a processor would fault here: %s\n", why);
  (void)!write(2, line, static_cast<size_t>(length));
  abort();
}

void expect(bool holds, const char* why) {
  if (!holds) fault(why);
}

// The registers of the interrupted code, in the frame of the signal.
class Registers {
 public:
  explicit Registers(ucontext_t* context)
      : general_(context->uc_mcontext.gregs), area_(reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs)) {}

  const uint8_t* code() const { return reinterpret_cast<const uint8_t*>(general_[REG_RIP]); }
  void skip_to(const uint8_t* next) { general_[REG_RIP] = reinterpret_cast<greg_t>(next); }

  uint64_t general(int number) const {
    static constexpr int kNames[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                       REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<uint64_t>(general_[kNames[number]]);
  }

  void read(int number, void* out) { move(number, static_cast<uint8_t*>(out), false); }
  void write(int number, const void* in) { move(number, static_cast<uint8_t*>(const_cast<void*>(in)), true); }

 private:
  // The state of one component; zeros where the processor left it out.
  uint8_t* part(int component) {
    uint32_t size, offset, c, d;
    if (component == 1) {
      offset = 160, size = 256;
    } else {
      __cpuid_count(13, component, size, offset, c, d);
    }
    uint64_t present;
    memcpy(&present, area_ + 512, 8);
    if (!(present >> component & 1)) {
      memset(area_ + offset, 0, size);
      present |= uint64_t{1} << component;
      memcpy(area_ + 512, &present, 8);
    }
    return area_ + offset;
  }

  void move(int number, uint8_t* value, bool to_register) {
    auto copy = [&](uint8_t* state, int at, size_t size) {
      memcpy(to_register ? state : value + at, to_register ? value + at : state, size);
    };
    if (number >= 16) return copy(part(7) + 64 * (number - 16), 0, 64);
    copy(part(1) + 16 * number, 0, 16);
    copy(part(2) + 16 * number, 16, 16);
    copy(part(6) + 32 * number, 32, 32);
  }

  greg_t* general_;
  uint8_t* area_;
};

struct Instruction {
  bool evex;
  int prefix, opcode;  // of map 0F38; prefix 0 to 3: none, 66, F3, F2
  int reg, rm, other;  // registers; rm of a memory operand is not used
  bool memory;
  uint64_t address;  // of a memory operand, without the index where it is a stride
  uint64_t stride;
  const uint8_t* next;
};

// Returns false for what is not encoded as the instructions that are known here.
bool decode(Registers& registers, Instruction& found) {
  const uint8_t* p = registers.code();
  found.evex = p[0] == 0x62;
  // Map 0F38 and W0: as EVEX with 64 bytes, without a mask or a broadcast; as VEX with 128 bits.
  if (found.evex) {
    if ((p[1] & 0x0f) != 2 || (p[2] & 0x84) != 4 || (p[3] & 0xf7) != 0x40) return false;
  } else if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || (p[2] & 0x84) != 0) {
    return false;
  }
  const int r = !(p[1] & 0x80), x = !(p[1] & 0x40), b = !(p[1] & 0x20);
  found.prefix = p[2] & 3;
  found.other = ~p[2] >> 3 & 15;
  found.reg = 0;
  if (found.evex) {
    found.other |= !(p[3] & 8) << 4;
    found.reg = !(p[1] & 0x10) << 4;
  }
  p += found.evex ? 4 : 3;
  found.opcode = *p++;
  const int mode = *p >> 6, rm = *p & 7;
  found.reg |= (*p >> 3 & 7) | r << 3;
  ++p;
  found.memory = mode != 3;
  found.rm = rm | b << 3 | (found.evex ? x << 4 : 0);
  found.address = found.stride = 0;
  if (found.memory) {
    bool relative = false;
    bool based = true;
    int base = rm | b << 3;
    uint64_t index = 0;
    if (rm == 4) {
      const int scale = *p >> 6, index_register = (*p >> 3 & 7) | x << 3;
      base = (*p & 7) | b << 3;
      based = mode != 0 || (*p & 7) != 5;
      ++p;
      if (index_register != 4) index = registers.general(index_register) << scale;
    } else if (mode == 0 && rm == 5) {
      relative = true;
      based = false;
    }
    int64_t moved = 0;
    if (mode == 1) {
      moved = static_cast<int8_t>(*p++) * (found.evex ? 64 : 1);
    } else if (mode == 2 || !based) {
      int32_t wide;
      memcpy(&wide, p, 4);
      moved = wide;
      p += 4;
    }
    found.address = static_cast<uint64_t>(moved) + (based ? registers.general(base) : 0);
    if (relative) found.address += reinterpret_cast<uint64_t>(p);
    const bool strided = !found.evex && found.opcode == 0x4b;
    (strided ? found.stride : found.address) += index;
  }
  found.next = p;
  return true;
}

float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// To the nearest even; denormal numbers become zero, and what is not a number a quiet one.
uint16_t to_bf16(uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool compute_vector(Registers& registers, const Instruction& one) {
  if (one.prefix != 2 || (one.opcode != 0x52 && one.opcode != 0x72)) return false;
  uint32_t source[16];
  if (one.memory) {
    memcpy(source, reinterpret_cast<const void*>(one.address), sizeof source);
  } else {
    registers.read(one.rm, source);
  }
  if (one.opcode == 0x72) {  // vcvtneps2bf16
    uint16_t words[32] = {};
    for (int i = 0; i < 16; ++i) words[i] = to_bf16(source[i]);
    registers.write(one.reg, words);
    return true;
  }
  uint32_t other[16];  // vdpbf16ps
  float sums[16];
  registers.read(one.other, other);
  registers.read(one.reg, sums);
  for (int i = 0; i < 16; ++i) {
    for (int shift = 16; shift >= 0; shift -= 16) {  // the second of a pair comes first
      sums[i] = fmaf(from_bf16(static_cast<uint16_t>(other[i] >> shift)),
                     from_bf16(static_cast<uint16_t>(source[i] >> shift)), sums[i]);
    }
  }
  registers.write(one.reg, sums);
  return true;
}

int rows_of(int tile) { return config.rows[tile]; }
int bytes_of(int tile) { return config.row_bytes[tile]; }

void load_config(uint64_t address) {
  TileConfig loaded;
  memcpy(&loaded, reinterpret_cast<const void*>(address), sizeof loaded);
  memset(tiles, 0, sizeof tiles);
  if (loaded.palette == 0) {
    config = TileConfig{};
    return;
  }
  expect(loaded.palette == 1 && loaded.start_row == 0, "a palette that is not known");
  for (uint8_t byte : loaded.reserved) expect(byte == 0, "reserved bytes of a tile configuration");
  for (int i = 0; i < 16; ++i) {
    expect(loaded.rows[i] <= kTileRows && loaded.row_bytes[i] <= kTileBytes, "a tile that is too large");
    expect((loaded.rows[i] == 0) == (loaded.row_bytes[i] == 0), "a tile with rows or with bytes alone");
    expect(i < kTiles || loaded.rows[i] == 0, "a tile beyond the last");
  }
  config = loaded;
}

// Adds to a row of sums. First and second inputs of the pairs are added up apart, and then together.
void add_bf16(const uint8_t* left, const uint8_t (*right)[kTileBytes], int steps, float* sums) {
  float parts[2][16] = {};
  for (int k = 0; k < steps; ++k) {
    for (int part = 0; part < 2; ++part) {
      uint16_t factor;
      memcpy(&factor, left + 4 * k + 2 * part, 2);
      for (int n = 0; n < 16; ++n) {
        uint16_t weight;
        memcpy(&weight, right[k] + 4 * n + 2 * part, 2);
        parts[part][n] = fmaf(from_bf16(factor), from_bf16(weight), parts[part][n]);
      }
    }
  }
  for (int n = 0; n < 16; ++n) sums[n] += parts[0][n] + parts[1][n];
}

void add_bytes(const uint8_t* left, const uint8_t (*right)[kTileBytes], int steps, int prefix, uint32_t* sums) {
  const bool left_signed = prefix >= 2, right_signed = prefix == 3 || prefix == 1;
  for (int k = 0; k < 4 * steps; ++k) {
    const int32_t factor = left_signed ? static_cast<int8_t>(left[k]) : left[k];
    for (int n = 0; n < 16; ++n) {
      const uint8_t weight = right[k / 4][4 * n + k % 4];
      sums[n] += static_cast<uint32_t>(factor * (right_signed ? static_cast<int8_t>(weight) : weight));
    }
  }
}

// Computes whole rows: what lies beyond a tile's columns is never stored.
void multiply(const Instruction& one) {
  const int sums = one.reg, left = one.rm, right = one.other;
  expect(sums != left && sums != right && left != right, "a product of a tile with itself");
  expect(rows_of(sums) != 0 && rows_of(left) == rows_of(sums) && bytes_of(right) == bytes_of(sums) &&
             bytes_of(left) == rows_of(right) * 4 && bytes_of(sums) % 4 == 0,
         "tiles whose shapes do not fit");
  const int steps = bytes_of(left) / 4;
  for (int m = 0; m < rows_of(sums); ++m) {
    if (one.opcode == 0x5c) {
      add_bf16(tiles[left][m], tiles[right], steps, reinterpret_cast<float*>(tiles[sums][m]));
    } else {
      add_bytes(tiles[left][m], tiles[right], steps, one.prefix, reinterpret_cast<uint32_t*>(tiles[sums][m]));
    }
  }
}

bool compute_tile(const Instruction& one) {
  if (one.opcode == 0x49) {
    if (one.memory && one.prefix == 0) {
      load_config(one.address);
    } else if (one.memory) {
      return false;
    } else if (one.prefix == 0) {  // tilerelease
      config = TileConfig{};
      memset(tiles, 0, sizeof tiles);
    } else if (one.prefix == 3) {  // tilezero
      expect(rows_of(one.reg) != 0, "a tile without a shape");
      memset(tiles[one.reg], 0, sizeof tiles[one.reg]);
    } else {
      return false;
    }
    return true;
  }
  if (one.opcode == 0x4b && one.memory) {
    expect(rows_of(one.reg) != 0, "a tile without a shape");
    const size_t size = static_cast<size_t>(bytes_of(one.reg));
    if (one.prefix == 2) {  // tilestored
      for (int m = 0; m < rows_of(one.reg); ++m) {
        memcpy(reinterpret_cast<void*>(one.address + static_cast<uint64_t>(m) * one.stride), tiles[one.reg][m], size);
      }
      return true;
    }
    memset(tiles[one.reg], 0, sizeof tiles[one.reg]);
    for (int m = 0; m < rows_of(one.reg); ++m) {
      memcpy(tiles[one.reg][m], reinterpret_cast<const void*>(one.address + static_cast<uint64_t>(m) * one.stride),
             size);
    }
    return true;
  }
  if (!one.memory && (one.opcode == 0x5e || (one.opcode == 0x5c && one.prefix == 2))) {
    multiply(one);
    return true;
  }
  return false;
}

void take(int, siginfo_t*, void* context) {
  // Denormal numbers count as zero, and rounding is to the nearest, whatever the program has set. The kernel restores
  // what it had.
  _mm_setcsr(0x9fc0);
  Registers registers(static_cast<ucontext_t*>(context));
  bool any = false;
  Instruction one;
  // Those that follow at once are computed too: a signal costs more than they do.
  while (decode(registers, one) && (one.evex ? compute_vector(registers, one) : compute_tile(one))) {
    registers.skip_to(one.next);
    any = true;
  }
  if (!any) signal(SIGILL, SIG_DFL);  // it will come again, and end the process
}

using Sigaction = int (*)(int, const struct sigaction*, struct sigaction*);

Sigaction real_sigaction() {
  static const Sigaction found = reinterpret_cast<Sigaction>(dlsym(RTLD_NEXT, "sigaction"));
  return found;
}

__attribute__((constructor)) void begin() {
  struct sigaction action = {};
  action.sa_sigaction = take;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  real_sigaction()(SIGILL, &action, nullptr);
}

}  // namespace

extern "C" {

// The core asks it: see core/isa.cpp.
__attribute__((visibility("default"))) bool headrace_computes_missing_instructions() { return true; }

// Keeps the signal: Python's faulthandler would replace the handler.
__attribute__((visibility("default"))) int sigaction(int number, const struct sigaction* action,
                                                     struct sigaction* before) noexcept {
  return real_sigaction()(number, number == SIGILL ? nullptr : action, before);
}
}
