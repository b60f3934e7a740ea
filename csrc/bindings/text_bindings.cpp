#include "bindings/text_bindings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/detokenizer.h"
#include "engine/stop_matcher.h"
#include "engine/token_table.h"
#include "ipc/shm_ring.h"

namespace py = pybind11;

namespace vllm_lite {
namespace {

// A message as Python sees it. The memoryview over it keeps it alive, and it the mapping: reading
// one that was kept past release() gives a later message's bytes, never a crash.
struct RingMessage {
  std::shared_ptr<ShmRing> ring;
  std::span<const std::byte> bytes;
};

py::buffer_info describe(RingMessage& message) {
  return py::buffer_info(const_cast<std::byte*>(message.bytes.data()), 1,
                         py::format_descriptor<uint8_t>::format(),
                         static_cast<py::ssize_t>(message.bytes.size()), /*readonly=*/true);
}

[[noreturn]] void raise_closed() {
  py::set_error(PyExc_EOFError, "the ring is closed");
  throw py::error_already_set();
}

bool push(ShmRing& ring, const py::buffer& message, int64_t timeout_ms) {
  const py::buffer_info info = message.request();
  if (info.ndim != 1 || (info.shape[0] > 1 && info.strides[0] != info.itemsize)) {
    throw py::value_error("message must be contiguous and of one dimension");
  }
  const std::span bytes(static_cast<const std::byte*>(info.ptr),
                        static_cast<size_t>(info.size * info.itemsize));
  ShmRing::Wait result;
  {
    py::gil_scoped_release no_gil;
    result = ring.push(bytes, std::chrono::milliseconds(timeout_ms));
  }
  if (result == ShmRing::Wait::kClosed) raise_closed();
  return result == ShmRing::Wait::kReady;
}

std::optional<py::memoryview> peek(const std::shared_ptr<ShmRing>& ring, int64_t timeout_ms) {
  std::span<const std::byte> bytes;
  ShmRing::Wait result;
  {
    py::gil_scoped_release no_gil;
    result = ring->peek(bytes, std::chrono::milliseconds(timeout_ms));
  }
  if (result == ShmRing::Wait::kClosed) raise_closed();
  if (result == ShmRing::Wait::kTimeout) return std::nullopt;
  return py::memoryview(py::cast(RingMessage{ring, bytes}));
}

std::shared_ptr<TokenTable> make_token_table(std::string bytes, std::vector<uint32_t> offsets,
                                             const std::string& kinds, TextDecoding decoding) {
  std::vector<TokenKind> typed_kinds;
  typed_kinds.reserve(kinds.size());
  for (const char kind : kinds) typed_kinds.push_back(static_cast<TokenKind>(kind));
  return std::make_shared<TokenTable>(std::move(bytes), std::move(offsets), std::move(typed_kinds),
                                      decoding);
}

void bind_tokens(py::module_& module) {
  py::enum_<TextDecoding>(module, "TextDecoding")
      .value("BYTE_LEVEL", TextDecoding::kByteLevel)
      .value("BYTE_FALLBACK", TextDecoding::kByteFallback);
  py::enum_<TokenKind>(module, "TokenKind")
      .value("NORMAL", TokenKind::kNormal)
      .value("SPECIAL", TokenKind::kSpecial)
      .value("BYTE", TokenKind::kByte);

  py::class_<TokenTable, std::shared_ptr<TokenTable>>(
      module, "TokenTable", "Token id -> bytes, and how those bytes become text.")
      .def(py::init(&make_token_table), py::arg("bytes"), py::arg("offsets"), py::arg("kinds"),
           py::arg("decoding"),
           "bytes: all tokens back to back; offsets: [tokens + 1], token i is "
           "bytes[offsets[i]:offsets[i + 1]]; kinds: bytes, one TokenKind value per token. Raises "
           "if the sizes do not agree or a token does not fit its kind.")
      .def("__len__", &TokenTable::size)
      .def(
          "bytes", [](const TokenTable& table, TokenId id) { return py::bytes(table.bytes(id)); },
          py::arg("id"), "The token's bytes; none for an id outside the table.")
      .def("kind", &TokenTable::kind, py::arg("id"))
      .def_property_readonly("decoding", &TokenTable::decoding);

  py::class_<Detokenizer>(module, "Detokenizer",
                          "Tokens to text, one token at a time, for one sequence.")
      .def(py::init<const TokenTable&, bool>(), py::arg("table"), py::arg("skip_special_tokens"),
           py::keep_alive<1, 2>())
      .def(
          "append",
          [](Detokenizer& self, const std::vector<TokenId>& tokens) {
            std::string text;
            for (const TokenId token : tokens) self.append(token, text);
            return text;
          },
          py::arg("tokens"), "The text that these tokens complete.")
      .def(
          "preview_tail",
          [](const Detokenizer& self) {
            std::string text;
            self.preview_tail(text);
            return text;
          },
          "What finish() would return now; changes nothing.")
      .def(
          "finish",
          [](Detokenizer& self) {
            std::string text;
            self.finish(text);
            return text;
          },
          "The sequence ended: what was held, ill-formed parts as U+FFFD.");
}

void bind_stops(py::module_& module) {
  py::class_<StopAutomaton, std::shared_ptr<StopAutomaton>>(
      module, "StopAutomaton", "Stop strings, built once for all sequences of a request.")
      .def(py::init<const std::vector<std::string>&>(), py::arg("stops"),
           "Raises for an empty stop string.")
      .def_property_readonly("stops", &StopAutomaton::stops);

  py::class_<StopMatcher>(module, "StopMatcher",
                          "Finds the first stop string in a text that arrives in pieces.")
      .def(py::init([](std::shared_ptr<StopAutomaton> automaton, bool include_stop_in_output) {
             return StopMatcher(std::move(automaton), include_stop_in_output);
           }),
           py::arg("automaton").none(false), py::arg("include_stop_in_output") = false)
      .def(
          "append",
          [](StopMatcher& self, std::string_view text) {
            std::string out;
            const int32_t stop = self.append(text, out);
            return std::pair(stop, out);
          },
          py::arg("text"),
          "(index of the stop string found or -1, text that may be shown). Nothing may be fed "
          "after "
          "a match.")
      .def("would_match", &StopMatcher::would_match, py::arg("text"),
           "Index of the stop string that this text would find, or -1; changes nothing.")
      .def(
          "finish",
          [](StopMatcher& self) {
            std::string out;
            self.finish(out);
            return out;
          },
          "The sequence ended without a match: the text held back.");
}

void bind_ring(py::module_& module) {
  py::class_<RingMessage>(module, "_RingMessage", py::buffer_protocol()).def_buffer(&describe);

  // Waits hold no GIL. A signal does not cut a wait short: its handler runs when the call returns.
  py::class_<ShmRing, std::shared_ptr<ShmRing>>(
      module, "ShmRing", "One-way ring of messages between two processes: one writer, one reader.")
      .def_static("create", &ShmRing::create, py::arg("num_slots"), py::arg("max_message_bytes"),
                  "A descriptor of new shared memory with a ring in it; the caller closes it, and "
                  "passes it to the other process (pass_fds).")
      .def(py::init<int>(), py::arg("fd"),
           "Maps the ring; the descriptor may be closed afterwards. Raises if it holds none.")
      .def_property_readonly("max_message_bytes", &ShmRing::max_message_bytes)
      .def("push", &push, py::arg("message"), py::arg("timeout_ms"),
           "Writes one message (bytes or another buffer). False if no slot came free in time; "
           "raises EOFError if the ring is closed.")
      .def("peek", &peek, py::arg("timeout_ms"),
           "A read-only memoryview of the next message, good until release(); None if none came in "
           "time. Raises EOFError once the ring is closed and read to its end.")
      .def("release", &ShmRing::release, "Frees the slot of the message that peek() returned.")
      .def("close", &ShmRing::close, "Wakes both sides and ends the ring.")
      .def_property_readonly("closed", &ShmRing::closed);
}

}  // namespace

void bind_text(py::module_& module) {
  bind_tokens(module);
  bind_stops(module);
  bind_ring(module);
}

}  // namespace vllm_lite
