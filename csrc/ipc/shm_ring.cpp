// Each side counts the messages it has written or released; the counters are 64 bits wide and never
// wrap. A side that finds nothing to do sleeps on the other side's 32-bit `signal`, which changes
// with every message and on close, so that nothing can happen unseen between its last look and its
// sleep.
#include "ipc/shm_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <limits>
#include <new>
#include <string>
#include <system_error>

#include "core/check.h"

namespace vllm_lite {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x474E49524C4C4D56;  // "VMLLRING" in memory
constexpr uint32_t kVersion = 1;
constexpr size_t kCacheLine = 64;
// A message that follows within this time costs no system call; above it a waiting side is idle.
constexpr std::chrono::microseconds kSpin{20};
// Keeps now() + timeout from overflowing.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);

[[noreturn]] void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error("ShmRing: " + what + ": " + std::generic_category().message(code));
}

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Sleeps while `word` is `expected`, at most `timeout`. May return early (EINTR, spurious wake).
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec relative = {static_cast<time_t>(seconds.count()),
                             static_cast<long>((timeout - seconds).count())};
  // Not FUTEX_PRIVATE: the two sides are different processes.
  if (syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0) != 0 &&
      errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
    throw_errno("waiting on the futex failed");
  }
}

}  // namespace

// How far one side has come; the other side waits on it.
struct alignas(kCacheLine) ShmRing::Counter {
  std::atomic<uint64_t> count{0};
  std::atomic<uint32_t> signal{0};
  std::atomic<uint32_t> has_sleeper{0};
};

struct ShmRing::Header {
  std::atomic<uint64_t> magic{0};  // set last, when the rest is in place
  uint32_t version = kVersion;
  uint32_t num_slots = 0;
  uint64_t max_message_bytes = 0;
  std::atomic<uint32_t> closed{0};
  Counter written;
  Counter released;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free &&
                  sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "atomics that two processes share must be plain words");

namespace {

// A slot is the message's length, then the message; whole cache lines.
size_t slot_bytes_for(size_t max_message_bytes) {
  return (sizeof(uint64_t) + max_message_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

}  // namespace

size_t ShmRing::required_bytes(int32_t num_slots, size_t max_message_bytes) {
  VL_CHECK(num_slots >= 1,
           "ShmRing: num_slots is " + std::to_string(num_slots) + "; it must be at least 1");
  // Half of the address space: sums below cannot overflow, and off_t can hold the result.
  const size_t limit = std::numeric_limits<size_t>::max() / 2 / static_cast<size_t>(num_slots);
  const size_t overhead = sizeof(Header) + sizeof(uint64_t) + kCacheLine;
  VL_CHECK(max_message_bytes >= 1 && limit > overhead && max_message_bytes <= limit - overhead,
           "ShmRing: max_message_bytes is " + std::to_string(max_message_bytes) +
               "; it must be at least 1, and " + std::to_string(num_slots) +
               " slots of it must fit in the address space");
  return sizeof(Header) + static_cast<size_t>(num_slots) * slot_bytes_for(max_message_bytes);
}

int ShmRing::create(int32_t num_slots, size_t max_message_bytes) {
  const size_t bytes = required_bytes(num_slots, max_message_bytes);
  const int fd = memfd_create("vllm_lite_ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create failed");
  try {
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      throw_errno("cannot make a memory of " + std::to_string(bytes) + " bytes");
    }
    // No side can take the memory away under the other one.
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_errno("cannot seal the size of the memory");
    }
    void* const memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw_errno("mmap failed");
    auto* const header = new (memory) Header;
    header->num_slots = static_cast<uint32_t>(num_slots);
    header->max_message_bytes = max_message_bytes;
    header->magic.store(kMagic, std::memory_order_release);
    munmap(memory, sizeof(Header));
  } catch (...) {
    ::close(fd);
    throw;
  }
  return fd;
}

ShmRing::ShmRing(int fd) {
  const std::string name = "descriptor " + std::to_string(fd);
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("cannot look at " + name);
  // Checked before mapping: touching a page past the end of the file would be a SIGBUS.
  VL_CHECK(S_ISREG(status.st_mode) && static_cast<size_t>(status.st_size) >= sizeof(Header),
           "ShmRing: " + name + " holds no ring: it is not a memory of at least " +
               std::to_string(sizeof(Header)) + " bytes");
  mapped_bytes_ = static_cast<size_t>(status.st_size);
  void* const memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map " + name);
  header_ = static_cast<Header*>(memory);
  slots_ = static_cast<std::byte*>(memory) + sizeof(Header);
  try {
    VL_CHECK(header_->magic.load(std::memory_order_acquire) == kMagic,
             "ShmRing: " + name + " holds no ring: its first bytes are not a ring's");
    VL_CHECK(header_->version == kVersion,
             "ShmRing: " + name + " holds a ring of version " + std::to_string(header_->version) +
                 ", this program speaks version " + std::to_string(kVersion) +
                 "; start both sides from the same installation");
    const uint32_t num_slots = header_->num_slots;
    VL_CHECK(
        num_slots <= static_cast<uint32_t>(std::numeric_limits<int32_t>::max()),
        "ShmRing: the ring in " + name + " is damaged: num_slots is " + std::to_string(num_slots));
    num_slots_ = num_slots;
    max_message_bytes_ = header_->max_message_bytes;
    const size_t required = required_bytes(static_cast<int32_t>(num_slots), max_message_bytes_);
    VL_CHECK(required == mapped_bytes_, "ShmRing: the ring in " + name +
                                            " is damaged: it says it takes " +
                                            std::to_string(required) + " bytes, the memory has " +
                                            std::to_string(mapped_bytes_));
    slot_bytes_ = slot_bytes_for(max_message_bytes_);
    // In this order: the other side may be at work, and `released` never passes `written`.
    const uint64_t released = header_->released.count.load(std::memory_order_acquire);
    const uint64_t written = header_->written.count.load(std::memory_order_acquire);
    VL_CHECK(written >= released,
             "ShmRing: the ring in " + name + " is damaged: " + std::to_string(released) +
                 " messages released of " + std::to_string(written) + " written");
  } catch (...) {
    munmap(memory, mapped_bytes_);
    throw;
  }
}

ShmRing::~ShmRing() { munmap(header_, mapped_bytes_); }

size_t ShmRing::max_message_bytes() const { return max_message_bytes_; }

template <typename Ready>
bool ShmRing::wait_until(Counter& counter, std::chrono::milliseconds timeout, const Ready& ready) {
  if (ready()) return true;
  if (timeout <= timeout.zero()) return false;
  const Clock::time_point start = Clock::now();
  const Clock::time_point deadline = start + std::min(timeout, kLongestWait);
  while (Clock::now() < start + kSpin) {
    pause_cpu();
    if (ready()) return true;
  }
  for (;;) {
    // Announce the sleep, note the signal, look again, sleep. In the single order of these three
    // and of wake()'s two, either wake() sees the announcement or this sees what it signalled.
    counter.has_sleeper.store(1, std::memory_order_seq_cst);
    const uint32_t signal = counter.signal.load(std::memory_order_seq_cst);
    const bool is_ready = ready();
    const auto left = deadline - Clock::now();
    if (is_ready || left <= left.zero()) {
      counter.has_sleeper.store(0, std::memory_order_relaxed);
      return is_ready;
    }
    futex_wait(counter.signal, signal, left);
  }
}

void ShmRing::wake(Counter& counter) {
  counter.signal.fetch_add(1, std::memory_order_seq_cst);
  if (counter.has_sleeper.load(std::memory_order_seq_cst) == 0) return;
  // Cannot fail: the word is mapped and aligned.
  syscall(SYS_futex, &counter.signal, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr,
          0);
}

void ShmRing::advance(Counter& counter) {
  // One side owns the counter, so this is a store; release publishes (or gives back) the slot.
  counter.count.store(counter.count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  wake(counter);
}

ShmRing::Wait ShmRing::push(std::span<const std::byte> message, std::chrono::milliseconds timeout) {
  VL_CHECK(message.size() <= max_message_bytes_,
           "ShmRing: a message of " + std::to_string(message.size()) +
               " bytes is longer than max_message_bytes, " + std::to_string(max_message_bytes_));
  const uint64_t written = header_->written.count.load(std::memory_order_relaxed);
  const bool ready = wait_until(header_->released, timeout, [&] {
    return closed() ||
           written - header_->released.count.load(std::memory_order_acquire) < num_slots_;
  });
  if (closed()) return Wait::kClosed;
  if (!ready) return Wait::kTimeout;
  std::byte* const target = slot(written);
  const uint64_t size = message.size();
  std::memcpy(target, &size, sizeof(size));
  if (size != 0) std::memcpy(target + sizeof(size), message.data(), size);
  advance(header_->written);
  return Wait::kReady;
}

ShmRing::Wait ShmRing::peek(std::span<const std::byte>& message,
                            std::chrono::milliseconds timeout) {
  const uint64_t released = header_->released.count.load(std::memory_order_relaxed);
  const auto has_message = [&] {
    return header_->written.count.load(std::memory_order_acquire) != released;
  };
  const bool ready =
      wait_until(header_->written, timeout, [&] { return has_message() || closed(); });
  // Looked at again, after closed(): what was written before the close is still delivered.
  if (!has_message()) return ready ? Wait::kClosed : Wait::kTimeout;
  const std::byte* const source = slot(released);
  uint64_t size = 0;
  std::memcpy(&size, source, sizeof(size));
  VL_CHECK(size <= max_message_bytes_, "ShmRing: the ring is damaged: a message of " +
                                           std::to_string(size) + " bytes in slots of " +
                                           std::to_string(max_message_bytes_));
  message = {source + sizeof(size), static_cast<size_t>(size)};
  return Wait::kReady;
}

void ShmRing::release() {
  VL_CHECK(header_->written.count.load(std::memory_order_relaxed) !=
               header_->released.count.load(std::memory_order_relaxed),
           "ShmRing: release() without a message that peek() returned");
  advance(header_->released);
}

void ShmRing::close() {
  header_->closed.store(1, std::memory_order_release);
  wake(header_->written);
  wake(header_->released);
}

bool ShmRing::closed() const { return header_->closed.load(std::memory_order_acquire) != 0; }

}  // namespace vllm_lite
