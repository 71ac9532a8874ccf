// The operators' names and schemas in torch; the other `register_*.cpp` have their checks.
//
// One library a build; each build has a namespace of its own (MINISERVE_NAMESPACE), so that several can be loaded.

#include "checks.h"

namespace miniserve {
namespace {

void begin_recording_op(int64_t num_tokens, int64_t num_requests) { begin_recording({num_tokens, num_requests}); }
int64_t end_recording_op() { return end_recording(); }
void replay_op(int64_t recording, int64_t num_tokens, int64_t num_requests) {
  replay(recording, {num_tokens, num_requests}, num_threads());
}
void forget_op(int64_t recording) { forget(recording); }

}  // namespace

MINISERVE_LIBRARY(MINISERVE_NAMESPACE, library) {
  library.def(
      "linear(Tensor x, Tensor packed, int columns, Tensor? bias, Tensor? norm, float eps, str epilogue, "
      "str activation, Tensor(a!) out) -> ()");
  library.def(
      "feed_forward(Tensor(a!) residual, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
      "int intermediate, Tensor? norm, float eps, str activation) -> ()");
  library.def("add(Tensor(a!) residual, Tensor x, Tensor? norm, float eps, float scale) -> ()");
  library.def("normalise(Tensor(a!) x, int first, Tensor norm, float eps) -> ()");
  library.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("unpack_columns(Tensor packed, int columns, Tensor ids, float scale, Tensor(a!) out) -> ()");
  library.def(
      "linear_quantised(Tensor x, Tensor packed, Tensor? scales, int columns, int bits, bool has_offsets, "
      "int num_digits, Tensor? bias, Tensor? norm, float eps, str epilogue, str activation, Tensor(a!) out) -> ()");
  library.def("pack_grid(Tensor codes, Tensor? scales, Tensor? offsets, int bits, Tensor(a!) packed) -> ()");
  library.def(
      "unpack_quantised_columns(Tensor packed, Tensor? scales, int columns, int bits, bool has_offsets, Tensor ids, "
      "float scale, Tensor(a!) out) -> ()");
  library.def(
      "attention(Tensor(a!) qkv, int num_kv_heads, Tensor? rope, Tensor? q_norm, Tensor? k_norm, float eps, "
      "float scale, float soft_cap, int window, Tensor? sinks, Tensor(b!) cache, Tensor query_start, "
      "Tensor seq_lens, Tensor block_tables, Tensor(c!) out) -> ()");
  library.def("forbid(Tensor logits, Tensor masks, Tensor(a!) out) -> ()");
  library.def("largest_of_rows(Tensor logits, Tensor(a!) ids, Tensor(b!) values) -> ()");
  library.def(
      "token_logprobs(Tensor logits, Tensor ids, Tensor(a!) ranks, Tensor(b!) logprobs, Tensor(c!) top_ids) -> ()");
  library.def(
      "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor(a!) ids) -> ()");
  library.def("begin_recording(int num_tokens, int num_requests) -> ()");
  library.def("end_recording() -> int");
  library.def("replay(int recording, int num_tokens, int num_requests) -> ()");
  library.def("forget(int recording) -> ()");
}

// Without a tensor there is nothing that would choose the CPU.
MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl("begin_recording", TORCH_BOX(&begin_recording_op));
  library.impl("end_recording", TORCH_BOX(&end_recording_op));
  library.impl("replay", TORCH_BOX(&replay_op));
  library.impl("forget", TORCH_BOX(&forget_op));
}

}  // namespace miniserve
