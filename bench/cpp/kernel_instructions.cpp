// Runs one case of the CPU kernels, on one thread, a number of times in measured_steps(), the one
// function that check_instructions.py lets callgrind count. Sizes are those of SmolLM2-135M.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention/params.h"
#include "core/kv_layout_cpu.h"
#include "ops/linear.h"
#include "ops/ops.h"
#include "ops/rope_store_kv.h"

namespace {

using namespace vllm_lite;

constexpr int64_t kHidden = 576, kMlp = 1536;
constexpr int32_t kHeads = 9, kKvHeads = 3, kHeadSize = 64, kBlockSize = 16, kContext = 512;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kHeadSize;

// 64-byte aligned, zero.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : data_(static_cast<uint8_t*>(::operator new(static_cast<size_t>(bytes), kAlignment))) {
    std::memset(data_.get(), 0, static_cast<size_t>(bytes));
  }
  void* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<uint8_t, Free> data_;
};

class Product {
 public:
  Product(WeightFormat format, int64_t rows, int64_t columns, int64_t num_tokens,
          bool is_gated = false)
      : packed_(packed_weight_bytes(format, is_gated ? 2 * rows : rows, columns)),
        input_(num_tokens * columns * 2),
        out_(num_tokens * rows * 2) {
    params_.packed = packed_.get();
    params_.input = input_.get();
    params_.out = out_.get();
    params_.format = format;
    params_.rows = params_.out_stride = rows;
    params_.columns = params_.input_stride = columns;
    params_.num_tokens = num_tokens;
    params_.is_gated = is_gated;
    params_.dtype = params_.out_dtype = DType::kBFloat16;
  }
  void run() const { linear_cpu(params_); }

 private:
  Memory packed_, input_, out_;
  LinearParams params_{};
};

// A decode of `num_seqs` sequences: one layer, without its products' weights in any cache's way.
class Layer {
 public:
  explicit Layer(int32_t num_seqs, KvDType kv_dtype = KvDType::kAsQuery)
      : num_seqs_(num_seqs),
        kv_dtype_(kv_dtype),
        blocks_each_(kContext / kBlockSize),
        cache_(int64_t{num_seqs} * blocks_each_ * 2 * kKvHeads * kBlockSize *
               (kv_dtype == KvDType::kInt8 ? kHeadSize + kKvScaleBytes : kHeadSize * 2)),
        activations_(num_seqs * kQkv * 2),
        out_(num_seqs * kHidden * 2),
        residual_(num_seqs * kHidden * 2),
        norm_weight_(kHidden * 2),
        cos_sin_(int64_t{kContext} * kHeadSize * 4),
        qkv_(WeightFormat::kBFloat16, kQkv, kHidden, num_seqs),
        output_(WeightFormat::kBFloat16, kHidden, kHidden, num_seqs),
        gate_up_(WeightFormat::kBFloat16, kMlp, kHidden, num_seqs, true),
        down_(WeightFormat::kBFloat16, kHidden, kMlp, num_seqs) {
    for (int32_t i = 0; i < num_seqs; ++i) {
      for (int32_t b = 0; b < blocks_each_; ++b) table_.push_back(i * blocks_each_ + b);
      rows_.push_back(i);
      query_start_.push_back(i);
      lengths_.push_back(kContext);
      positions_.push_back(kContext - 1);
      slots_.push_back((i + 1) * int64_t{kContext} - 1);
    }
    query_start_.push_back(num_seqs);
  }

  void attend() const {
    PagedAttentionParams p{};
    p.out = out_.get();
    p.query = activations_.get();
    p.kv_cache = cache_.get();
    p.block_tables = table_.data();
    p.rows = rows_.data();
    p.query_start = query_start_.data();
    p.seq_lens = lengths_.data();
    p.out_token_stride = kHidden;
    p.query_token_stride = kQkv;
    p.block_table_stride = blocks_each_;
    p.num_blocks = int64_t{num_seqs_} * blocks_each_;
    p.num_tokens = p.max_rows = p.num_seqs = num_seqs_;
    p.num_heads = kHeads;
    p.num_kv_heads = kKvHeads;
    p.head_size = kHeadSize;
    p.block_size = kBlockSize;
    p.scale = 0.125f;
    p.dtype = DType::kBFloat16;
    p.kv_dtype = kv_dtype_;
    p.k_scale = p.v_scale = 1;
    paged_attention_cpu(p);
  }
  void run() const {
    norm();
    qkv_.run();
    rope_and_store();
    attend();
    output_.run();
    norm();
    gate_up_.run();
    down_.run();
  }

 private:
  void norm() const {
    RmsNormParams p{};
    p.out = out_.get();
    p.input = out_.get();
    p.residual = residual_.get();
    p.weight = norm_weight_.get();
    p.out_outer_stride = p.input_outer_stride = p.residual_outer_stride = kHidden;
    p.num_outer = num_seqs_;
    p.num_inner = 1;
    p.size = kHidden;
    p.epsilon = 1e-5f;
    p.dtype = DType::kBFloat16;
    rms_norm_cpu(p);
  }
  void rope_and_store() const {
    RopeStoreKvParams p{};
    auto* const query = static_cast<uint16_t*>(activations_.get());
    uint16_t* const key = query + kHeads * kHeadSize;
    p.rope.query = query;
    p.rope.key = key;
    p.rope.positions = positions_.data();
    p.rope.cos_sin = static_cast<const float*>(cos_sin_.get());
    p.rope.query_token_stride = p.rope.key_token_stride = kQkv;
    p.rope.max_position = kContext;
    p.rope.num_tokens = num_seqs_;
    p.rope.num_heads = kHeads;
    p.rope.num_kv_heads = kKvHeads;
    p.rope.head_size = p.rope.rotary_size = kHeadSize;
    p.rope.dtype = DType::kBFloat16;
    p.store.key = key;
    p.store.value = key + kKvHeads * kHeadSize;
    p.store.kv_cache = cache_.get();
    p.store.slot_mapping = slots_.data();
    p.store.key_token_stride = p.store.value_token_stride = kQkv;
    p.store.num_blocks = int64_t{num_seqs_} * blocks_each_;
    p.store.num_tokens = num_seqs_;
    p.store.num_kv_heads = kKvHeads;
    p.store.head_size = kHeadSize;
    p.store.block_size = kBlockSize;
    p.store.dtype = DType::kBFloat16;
    p.store.kv_dtype = kv_dtype_;
    p.store.k_scale = p.store.v_scale = 1;
    rope_store_kv_cpu(p);
  }

  const int32_t num_seqs_;
  const KvDType kv_dtype_;
  const int32_t blocks_each_;
  Memory cache_, activations_, out_, residual_, norm_weight_, cos_sin_;
  Product qkv_, output_, gate_up_, down_;
  std::vector<int32_t> table_, rows_, query_start_, lengths_, positions_;
  std::vector<int64_t> slots_;
};

std::function<void()> product(WeightFormat format, int64_t num_tokens) {
  const auto made = std::make_shared<Product>(format, 2 * kMlp, kHidden, num_tokens);
  return [made] { made->run(); };
}

const std::map<std::string, std::function<std::function<void()>()>>& cases() {
  static const std::map<std::string, std::function<std::function<void()>()>> all = {
      {"linear_bfloat16_1", [] { return product(WeightFormat::kBFloat16, 1); }},
      {"linear_bfloat16_16", [] { return product(WeightFormat::kBFloat16, 16); }},
      {"linear_bfloat16_128", [] { return product(WeightFormat::kBFloat16, 128); }},
      {"linear_int8_1", [] { return product(WeightFormat::kInt8, 1); }},
      {"linear_q4_1_1", [] { return product(WeightFormat::kQ4_1, 1); }},
      {"linear_q4_1_16", [] { return product(WeightFormat::kQ4_1, 16); }},
      {"attention_decode_8",
       [] {
         const auto layer = std::make_shared<Layer>(8);
         return [layer] { layer->attend(); };
       }},
      {"attention_decode_int8_8",
       [] {
         const auto layer = std::make_shared<Layer>(8, KvDType::kInt8);
         return [layer] { layer->attend(); };
       }},
      {"decode_layer_1",
       [] {
         const auto layer = std::make_shared<Layer>(1);
         return [layer] { layer->run(); };
       }},
      {"decode_layer_8",
       [] {
         const auto layer = std::make_shared<Layer>(8);
         return [layer] { layer->run(); };
       }},
  };
  return all;
}

}  // namespace

extern "C" [[gnu::noinline]] void measured_steps(const std::function<void()>& step, int num_steps) {
  for (int i = 0; i < num_steps; ++i) step();
}

int main(int argc, char** argv) {
  const int num_steps = argc == 3 ? std::atoi(argv[2]) : 0;
  const auto found = argc == 3 ? cases().find(argv[1]) : cases().end();
  if (num_steps < 1 || found == cases().end()) {
    std::fprintf(stderr, "usage: kernel_instructions CASE STEPS\n");
    return 2;
  }
  const std::function<void()> step = found->second();
  step();  // scratch memory grows in the first
  measured_steps(step, num_steps);
  return 0;
}
