// One-way ring of messages between two processes, in memory that both map; a waiting side sleeps on
// a futex. One writer, one reader. No name in the file system: the memory is a memfd whose
// descriptor is inherited, so nothing is left behind whatever dies.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace vllm_lite {

class ShmRing {
 public:
  // Bytes that the memory must have for `num_slots` messages of at most `max_message_bytes`.
  static size_t required_bytes(int32_t num_slots, size_t max_message_bytes);
  // Creates an anonymous shared memory of that size, lays the ring out in it and returns its
  // descriptor (close-on-exec; pass it on deliberately). Throws Error with errno's text.
  static int create(int32_t num_slots, size_t max_message_bytes);

  // Maps an existing ring. Throws Error if the descriptor does not hold one. Does not own `fd`. A
  // side that was restarted attaches again and goes on where its predecessor stopped.
  explicit ShmRing(int fd);
  ~ShmRing();
  ShmRing(const ShmRing&) = delete;
  ShmRing& operator=(const ShmRing&) = delete;

  size_t max_message_bytes() const;

  enum class Wait : uint8_t { kReady, kTimeout, kClosed };

  // Writer. Copies the message into the next slot once it is free and wakes the reader.
  // Throws Error if it is longer than max_message_bytes. kClosed if either side closed.
  Wait push(std::span<const std::byte> message, std::chrono::milliseconds timeout);

  // Reader. On kReady `message` points into the ring, 8-byte aligned, until release().
  Wait peek(std::span<const std::byte>& message, std::chrono::milliseconds timeout);
  // Frees the slot of the message that peek returned. Throws Error if there is none.
  void release();

  // Wakes both sides; every later push and peek (once the messages already there are read) returns
  // kClosed.
  void close();
  bool closed() const;

 private:
  struct Counter;
  struct Header;

  std::byte* slot(uint64_t count) const { return slots_ + (count % num_slots_) * slot_bytes_; }
  // Calls ready() until it is true, asleep on `counter` in between; false once the time is over.
  template <typename Ready>
  static bool wait_until(Counter& counter, std::chrono::milliseconds timeout, const Ready& ready);
  // Counts one more message written or released and wakes the side that waits for it.
  static void advance(Counter& counter);
  static void wake(Counter& counter);

  Header* header_ = nullptr;
  std::byte* slots_ = nullptr;
  size_t mapped_bytes_ = 0;
  // Copies of the header's, checked once: a peer gone wild cannot lead us out of the mapping.
  uint64_t num_slots_ = 0;
  size_t slot_bytes_ = 0;
  size_t max_message_bytes_ = 0;
};

}  // namespace vllm_lite
