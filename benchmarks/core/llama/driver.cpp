// Drives llama.cpp's library as an engine of benchmarks/core: one JSON object a line on stdin and stdout.
//
//   llama_driver MODEL.gguf THREADS auto|on|off     flash attention as the last word says
//   llama_driver --quantize IN.gguf OUT.gguf q8_0|q4_0 THREADS
//
// A single sequence keeps what it has in common with the one before, as a slot of llama.cpp's server does.
//
// Owns the prefill in batches of at most n_batch tokens and the decoding of all sequences in step. Greedy, and nothing
// but the library's own calls between the tokens: no HTTP, no sampler chain, no text.

#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

using json = nlohmann::json;
using Clock = std::chrono::steady_clock;
using Prompts = std::vector<std::vector<llama_token>>;

namespace {

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Engine {
 public:
  Engine(const char* path, int threads, const std::string& flash) : threads_(threads) {
    model_ = llama_model_load_from_file(path, llama_model_default_params());
    if (!model_) throw std::runtime_error("the model cannot be loaded");
    vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    flash_ = flash == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
             : flash == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                              : LLAMA_FLASH_ATTN_TYPE_AUTO;
    open(1, 2304);
  }

  ~Engine() {
    llama_free(context_);
    llama_model_free(model_);
  }

  // Seconds from the call to each token of each sequence.
  std::vector<std::vector<double>> generate(const Prompts& prompts, int count) {
    const auto start = Clock::now();
    const size_t sequences = prompts.size();
    std::vector<std::vector<double>> times(sequences);
    std::vector<llama_token> last(sequences);
    const size_t kept = keep_common(prompts);

    const int limit = static_cast<int>(llama_n_batch(context_));
    llama_batch batch = llama_batch_init(limit, 0, 1);
    std::vector<std::pair<size_t, int>> wanted;  // sequence, row
    const auto flush = [&] {
      if (batch.n_tokens == 0) return;
      if (llama_decode(context_, batch) != 0) throw std::runtime_error("llama_decode failed");
      llama_synchronize(context_);
      for (const auto& [sequence, row] : wanted) {
        last[sequence] = likeliest(row);
        times[sequence].push_back(since(start));
      }
      batch.n_tokens = 0;
      wanted.clear();
    };
    const auto add = [&](llama_token token, int position, size_t sequence, bool want) {
      if (batch.n_tokens == limit) flush();
      const int row = batch.n_tokens++;
      batch.token[row] = token;
      batch.pos[row] = position;
      batch.n_seq_id[row] = 1;
      batch.seq_id[row][0] = static_cast<llama_seq_id>(sequence);
      batch.logits[row] = want;
      if (want) wanted.emplace_back(sequence, row);
    };
    for (size_t sequence = 0; sequence < sequences; ++sequence)
      for (size_t at = kept; at < prompts[sequence].size(); ++at)
        add(prompts[sequence][at], static_cast<int>(at), sequence, at + 1 == prompts[sequence].size());
    flush();
    for (int step = 1; step < count; ++step) {
      for (size_t sequence = 0; sequence < sequences; ++sequence)
        add(last[sequence], static_cast<int>(prompts[sequence].size()) + step - 1, sequence, true);
      flush();
    }
    llama_batch_free(batch);
    return times;
  }

  // A context for so many sequences of so many tokens each, where the one at hand is not that.
  void prepare(int sequences, int length) {
    if (sequences == sequences_ && length <= length_) return;
    llama_free(context_);
    open(sequences, length);
  }

 private:
  // How many tokens of a single prompt are in the memory already; all else is forgotten.
  size_t keep_common(const Prompts& prompts) {
    const auto memory = llama_get_memory(context_);
    size_t kept = 0;
    if (prompts.size() == 1) {
      const auto& prompt = prompts[0];
      while (kept + 1 < prompt.size() && kept < held_.size() && prompt[kept] == held_[kept]) ++kept;
    }
    if (kept == 0 || !llama_memory_seq_rm(memory, 0, static_cast<llama_pos>(kept), -1)) {
      llama_memory_clear(memory, false);
      kept = 0;
    }
    held_ = prompts.size() == 1 ? prompts[0] : std::vector<llama_token>{};
    return kept;
  }

  void open(int sequences, int length) {
    const int each = (length + 255) / 256 * 256;
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = static_cast<uint32_t>(each * sequences);
    parameters.n_seq_max = static_cast<uint32_t>(sequences);
    parameters.n_threads = threads_;
    parameters.n_threads_batch = threads_;
    parameters.flash_attn_type = flash_;
    context_ = llama_init_from_model(model_, parameters);
    if (!context_) throw std::runtime_error("the context cannot be made");
    sequences_ = sequences;
    length_ = each;
    held_.clear();
  }

  llama_token likeliest(int row) const {
    const float* logits = llama_get_logits_ith(context_, row);
    int best = 0;
    for (int token = 1; token < vocab_; ++token)
      if (logits[token] > logits[best]) best = token;
    return best;
  }

  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  llama_flash_attn_type flash_;
  int threads_;
  int vocab_;
  int sequences_ = 0;
  int length_ = 0;
  std::vector<llama_token> held_;  // the prompt whose keys and values are in the memory
};

int quantize(const char* source, const char* target, const std::string& type, int threads) {
  llama_model_quantize_params parameters = llama_model_quantize_default_params();
  parameters.nthread = threads;
  parameters.ftype = type == "q4_0" ? LLAMA_FTYPE_MOSTLY_Q4_0 : LLAMA_FTYPE_MOSTLY_Q8_0;
  return static_cast<int>(llama_model_quantize(source, target, &parameters));
}

void serve(Engine& engine) {
  std::string line;
  while (std::getline(std::cin, line)) {
    try {
      const json request = json::parse(line);
      const auto prompts = request.at("prompts").get<Prompts>();
      const int count = request.at("new").get<int>();
      int longest = 0;
      for (const auto& prompt : prompts) longest = std::max(longest, static_cast<int>(prompt.size()));
      engine.prepare(static_cast<int>(prompts.size()), longest + count);
      std::cout << json{{"times", engine.generate(prompts, count)}} << std::endl;
    } catch (const std::exception& error) {
      std::cout << json{{"error", error.what()}} << std::endl;
    }
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    llama_backend_init();
    if (count == 6 && std::strcmp(words[1], "--quantize") == 0)
      return quantize(words[2], words[3], words[4], std::atoi(words[5]));
    if (count != 4) throw std::runtime_error("usage: llama_driver MODEL.gguf THREADS auto|on|off");
    Engine engine(words[1], std::atoi(words[2]), words[3]);
    const json facts{{"system", llama_print_system_info()}, {"flash_attention", words[3]}};
    std::cout << json{{"ready", true}, {"facts", facts}} << std::endl;
    serve(engine);
    return 0;
  } catch (const std::exception& error) {
    std::cout << json{{"error", error.what()}} << std::endl;
    return 1;
  }
}
