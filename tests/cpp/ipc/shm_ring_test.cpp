#include "ipc/shm_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/check.h"

namespace vllm_lite {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Wait = ShmRing::Wait;

// Far longer than anything takes: reaching it is a failure.
constexpr milliseconds kPatience{20000};
constexpr milliseconds kNow{0};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(int32_t num_slots, size_t max_message_bytes)
      : fd_(ShmRing::create(num_slots, max_message_bytes)) {}
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  operator int() const { return fd_; }

 private:
  int fd_;
};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_of(std::span<const std::byte> message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// Reads one message; "<timeout>" or "<closed>" where there is none.
std::string read(ShmRing& ring, milliseconds timeout = kNow) {
  std::span<const std::byte> message;
  const Wait result = ring.peek(message, timeout);
  if (result != Wait::kReady) return result == Wait::kTimeout ? "<timeout>" : "<closed>";
  std::string text = text_of(message);
  ring.release();
  return text;
}

// Message number i: a length and contents that tell it from its neighbours.
std::string nth_message(uint32_t i, size_t max_bytes) {
  std::minstd_rand random(i + 1);
  random();
  std::string text(random() % (max_bytes + 1), '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

// Runs `body` in a forked process; it returns whether all went well.
template <typename Body>
pid_t fork_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    bool ok = false;
    try {
      ok = body();
    } catch (...) {
    }
    _exit(ok ? 0 : 1);
  }
  return child;
}

bool exited_well(pid_t child) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ShmRing, DeliversInOrderAndKeepsAMessageUntilReleased) {
  const Descriptor fd(3, 100);
  ShmRing writer(fd), reader(fd);
  EXPECT_EQ(writer.max_message_bytes(), 100U);
  EXPECT_EQ(reader.max_message_bytes(), 100U);
  for (const std::string text : {"one", "", "three"}) {
    EXPECT_EQ(writer.push(bytes_of(text), kNow), Wait::kReady);
  }
  std::span<const std::byte> message;
  ASSERT_EQ(reader.peek(message, kNow), Wait::kReady);
  EXPECT_EQ(text_of(message), "one");
  ASSERT_EQ(reader.peek(message, kNow), Wait::kReady);
  EXPECT_EQ(text_of(message), "one") << "peek alone takes nothing";
  EXPECT_EQ(writer.push(bytes_of("four"), kNow), Wait::kTimeout) << "the slot is not free yet";
  reader.release();
  EXPECT_EQ(writer.push(bytes_of("four"), kNow), Wait::kReady);
  for (const std::string text : {"", "three", "four", "<timeout>"}) EXPECT_EQ(read(reader), text);
  EXPECT_THROW(reader.release(), Error);
}

TEST(ShmRing, MessagesAreAlignedAndAsLongAsAllowed) {
  for (const size_t max_bytes : {1, 7, 8, 55, 56, 57, 64, 1000}) {
    const Descriptor fd(2, max_bytes);
    ShmRing ring(fd);
    for (int i = 0; i < 5; ++i) {
      const std::string text(max_bytes, static_cast<char>('a' + i));
      ASSERT_EQ(ring.push(bytes_of(text), kNow), Wait::kReady);
      std::span<const std::byte> message;
      ASSERT_EQ(ring.peek(message, kNow), Wait::kReady);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(message.data()) % 8, 0U);
      EXPECT_EQ(text_of(message), text);
      ring.release();
    }
    EXPECT_THROW(ring.push(bytes_of(std::string(max_bytes + 1, 'x')), kNow), Error);
  }
}

TEST(ShmRing, RefusesSizesThatCannotBe) {
  EXPECT_THROW(ShmRing::create(0, 8), Error);
  EXPECT_THROW(ShmRing::create(-1, 8), Error);
  EXPECT_THROW(ShmRing::create(1, 0), Error);
  EXPECT_THROW(ShmRing::create(2, std::numeric_limits<size_t>::max()), Error);
  EXPECT_THROW(ShmRing::create(1, std::numeric_limits<size_t>::max() / 2), Error);
  EXPECT_THROW(ShmRing::create(1 << 30, std::numeric_limits<size_t>::max() >> 30), Error);
  EXPECT_GE(ShmRing::required_bytes(4, 100), 4U * 100);
}

TEST(ShmRing, IsClosedOnExecAndCannotBeTruncated) {
  const Descriptor fd(2, 8);
  EXPECT_TRUE(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, 1 << 20), 0);
}

TEST(ShmRing, RefusesADescriptorThatHoldsNoRing) {
  EXPECT_THROW(ShmRing(-1), Error);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Descriptor read_end(ends[0]), write_end(ends[1]);
  EXPECT_THROW(ShmRing{int{read_end}}, Error);

  const Descriptor plain(memfd_create("plain", MFD_CLOEXEC));
  EXPECT_THROW(ShmRing{int{plain}}, Error) << "empty";
  ASSERT_EQ(ftruncate(plain, 1 << 16), 0);
  EXPECT_THROW(ShmRing{int{plain}}, Error) << "zeros";
}

// magic, version, num_slots and max_message_bytes fill the first 24 bytes, without gaps.
constexpr off_t kCheckedHeaderBytes = 24;

TEST(ShmRing, RefusesADamagedHeader) {
  const Descriptor fd(4, 100);
  for (off_t at = 0; at < kCheckedHeaderBytes; ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xFF}) {
      uint8_t byte = 0;
      ASSERT_EQ(pread(fd, &byte, 1, at), 1);
      const uint8_t damaged = byte ^ flip;
      ASSERT_EQ(pwrite(fd, &damaged, 1, at), 1);
      // A few bytes more or less in a message can take the same slots; then the ring is as good.
      const bool is_low_length_byte = at == 16;
      if (!is_low_length_byte) {
        EXPECT_THROW(ShmRing{int{fd}}, Error) << "byte " << at;
      }
      ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
    }
  }
  EXPECT_NO_THROW(ShmRing{int{fd}});
}

TEST(ShmRing, RefusesAHeaderInAMemoryOfAnotherSize) {
  const Descriptor ring(4, 100);
  char header[256];
  ASSERT_EQ(pread(ring, header, sizeof(header), 0), static_cast<ssize_t>(sizeof(header)));
  const size_t right = ShmRing::required_bytes(4, 100);
  for (const size_t size : {size_t{16}, size_t{256}, right - 64, right - 1, right + 1, right}) {
    const Descriptor copy(memfd_create("copy", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(copy, static_cast<off_t>(size)), 0);
    const size_t part = std::min(size, sizeof(header));
    ASSERT_EQ(pwrite(copy, header, part, 0), static_cast<ssize_t>(part));
    if (size == right) {
      EXPECT_NO_THROW(ShmRing{int{copy}});
    } else {
      EXPECT_THROW(ShmRing{int{copy}}, Error) << size;
    }
  }
}

TEST(ShmRing, TimesOutAsleepAndNotEarly) {
  const Descriptor fd(1, 8);
  ShmRing ring(fd);
  const auto cpu_time = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
  const milliseconds timeout(100);
  const auto expect_timeout = [&](const auto& wait) {
    const auto start = Clock::now();
    const auto cpu_start = cpu_time();
    EXPECT_EQ(wait(), Wait::kTimeout);
    EXPECT_GE(Clock::now() - start, timeout);
    EXPECT_LT(Clock::now() - start, kPatience);
    EXPECT_LT(cpu_time() - cpu_start, timeout / 5) << "waiting must not spin";
  };
  std::span<const std::byte> message;
  expect_timeout([&] { return ring.peek(message, timeout); });
  ASSERT_EQ(ring.push(bytes_of("x"), kNow), Wait::kReady);
  expect_timeout([&] { return ring.push(bytes_of("y"), timeout); });
  EXPECT_EQ(ring.push(bytes_of("y"), milliseconds(-5)), Wait::kTimeout);
  EXPECT_EQ(read(ring, milliseconds::max()), "x");
}

std::atomic<int> num_signals{0};

// Signals make the futex return early; the wait must go on and still end in time.
TEST(ShmRing, SignalsNeitherEndNorProlongAWait) {
  struct sigaction action = {}, previous = {};
  action.sa_handler = [](int) { num_signals.fetch_add(1); };  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &action, &previous), 0);
  const Descriptor fd(1, 8);
  ShmRing ring(fd);
  std::atomic<bool> done{false};
  const pthread_t waiter = pthread_self();
  std::thread nuisance([&] {
    while (!done) {
      pthread_kill(waiter, SIGUSR1);
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  const auto start = Clock::now();
  EXPECT_EQ(read(ring, milliseconds(200)), "<timeout>");
  EXPECT_GE(Clock::now() - start, milliseconds(200));
  EXPECT_LT(Clock::now() - start, kPatience);
  done = true;
  nuisance.join();
  sigaction(SIGUSR1, &previous, nullptr);
  EXPECT_GT(num_signals, 0);
}

TEST(ShmRing, CloseWakesTheOtherSide) {
  const Descriptor fd(1, 8);
  {
    ShmRing writer(fd), reader(fd);
    std::thread closer([&] {
      std::this_thread::sleep_for(milliseconds(30));
      writer.close();
    });
    EXPECT_EQ(read(reader, kPatience), "<closed>");
    closer.join();
    EXPECT_TRUE(reader.closed());
  }
  const Descriptor full_fd(1, 8);
  ShmRing writer(full_fd), reader(full_fd);
  ASSERT_EQ(writer.push(bytes_of("last"), kNow), Wait::kReady);
  std::thread closer([&] {
    std::this_thread::sleep_for(milliseconds(30));
    reader.close();
  });
  EXPECT_EQ(writer.push(bytes_of("never"), kPatience), Wait::kClosed);
  closer.join();
  EXPECT_EQ(writer.push(bytes_of("never"), kNow), Wait::kClosed);
  EXPECT_EQ(read(reader), "last") << "what was there before the close is still delivered";
  EXPECT_EQ(read(reader, kPatience), "<closed>");
}

// A full ring of one or two slots: each side sleeps on the other all the time.
TEST(ShmRing, TwoThreadsPassMessagesOfRandomSizes) {
  for (const int32_t num_slots : {1, 2, 7}) {
    constexpr uint32_t kMessages = 5000;
    constexpr size_t kMaxBytes = 700;
    const Descriptor fd(num_slots, kMaxBytes);
    std::thread writer_thread([&] {
      ShmRing writer(fd);
      for (uint32_t i = 0; i < kMessages; ++i) {
        ASSERT_EQ(writer.push(bytes_of(nth_message(i, kMaxBytes)), kPatience), Wait::kReady);
      }
      writer.close();
    });
    ShmRing reader(fd);
    for (uint32_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(read(reader, kPatience), nth_message(i, kMaxBytes)) << i;
    }
    EXPECT_EQ(read(reader, kPatience), "<closed>");
    writer_thread.join();
  }
}

// Pauses about as long as a side spins before it sleeps: messages arrive at every point of falling
// asleep, and one whose wake-up was lost would time out.
TEST(ShmRing, NoWakeUpIsLostWhileFallingAsleep) {
  constexpr uint32_t kMessages = 4000;
  const Descriptor there(1, 8), back(1, 8);
  const auto dawdle = [](std::minstd_rand& random) {
    const auto until = Clock::now() + std::chrono::nanoseconds(random() % 60000);
    while (Clock::now() < until) {
    }
  };
  std::thread echo([&] {
    ShmRing in(there), out(back);
    std::minstd_rand random(1);
    for (uint32_t i = 0; i < kMessages; ++i) {
      const std::string text = read(in, kPatience);
      dawdle(random);
      ASSERT_EQ(out.push(bytes_of(text), kPatience), Wait::kReady);
    }
  });
  ShmRing out(there), in(back);
  std::minstd_rand random(2);
  for (uint32_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(out.push(bytes_of(std::to_string(i)), kPatience), Wait::kReady);
    dawdle(random);
    ASSERT_EQ(read(in, kPatience), std::to_string(i));
  }
  echo.join();
}

TEST(ShmRing, AMillionSmallMessagesKeepTheirOrder) {
  constexpr uint64_t kMessages = 1000000;
  const Descriptor fd(1024, sizeof(uint64_t));
  std::thread writer_thread([&] {
    ShmRing writer(fd);
    for (uint64_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(writer.push(std::as_bytes(std::span(&i, 1)), kPatience), Wait::kReady);
    }
  });
  ShmRing reader(fd);
  uint64_t num_right = 0;
  for (uint64_t i = 0; i < kMessages; ++i) {
    std::span<const std::byte> message;
    ASSERT_EQ(reader.peek(message, kPatience), Wait::kReady);
    uint64_t value = 0;
    if (message.size() == sizeof(value)) std::memcpy(&value, message.data(), sizeof(value));
    num_right += value == i;
    reader.release();
  }
  EXPECT_EQ(num_right, kMessages);
  writer_thread.join();
}

TEST(ShmRing, TwoProcessesPassMessagesBothWays) {
  constexpr uint32_t kMessages = 3000;
  constexpr size_t kMaxBytes = 3000;
  const Descriptor there(2, kMaxBytes), back(1, kMaxBytes);
  const pid_t child = fork_child([&] {
    ShmRing in(there), out(back);
    for (;;) {
      const std::string text = read(in, kPatience);
      if (text == "<closed>") break;
      if (out.push(bytes_of(text + "!"), kPatience) != Wait::kReady) return false;
    }
    out.close();
    return true;
  });
  ASSERT_GT(child, 0);
  ShmRing out(there), in(back);
  for (uint32_t i = 0; i < kMessages; ++i) {
    const std::string text = nth_message(i, kMaxBytes - 1);
    ASSERT_EQ(out.push(bytes_of(text), kPatience), Wait::kReady);
    ASSERT_EQ(read(in, kPatience), text + "!") << i;
  }
  out.close();
  EXPECT_EQ(read(in, kPatience), "<closed>");
  EXPECT_TRUE(exited_well(child));
}

TEST(ShmRing, CloseWakesTheOtherProcess) {
  for (const bool child_reads : {true, false}) {
    const Descriptor fd(1, 8);
    ShmRing ring(fd);
    if (!child_reads) {
      ASSERT_EQ(ring.push(bytes_of("full"), kNow), Wait::kReady);
    }
    const pid_t child = fork_child([&] {
      ShmRing mine(fd);
      return child_reads ? read(mine, kPatience) == "<closed>"
                         : mine.push(bytes_of("more"), kPatience) == Wait::kClosed;
    });
    ASSERT_GT(child, 0);
    std::this_thread::sleep_for(milliseconds(50));
    ring.close();
    EXPECT_TRUE(exited_well(child));
  }
}

// A reader that is killed leaves the message it had not released to its successor.
TEST(ShmRing, ARestartedReaderGoesOnWhereTheKilledOneStopped) {
  const Descriptor fd(4, 16);
  ShmRing writer(fd);
  const pid_t victim = fork_child([&] {
    ShmRing mine(fd);
    bool ok = read(mine, kPatience) == "0";
    std::span<const std::byte> message;
    ok = ok && mine.peek(message, kPatience) == Wait::kReady;  // "1", never released
    mine.peek(message, kNow);
    while (ok) pause();
    return false;
  });
  ASSERT_GT(victim, 0);
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(writer.push(bytes_of(std::to_string(i)), kPatience), Wait::kReady);
  }
  ASSERT_EQ(writer.push(bytes_of("4"), kPatience), Wait::kReady) << "once 0 is released";
  kill(victim, SIGKILL);
  EXPECT_FALSE(exited_well(victim));
  EXPECT_EQ(writer.push(bytes_of("5"), milliseconds(20)), Wait::kTimeout);
  ShmRing successor(fd);
  for (int i = 1; i < 5; ++i) EXPECT_EQ(read(successor), std::to_string(i));
  EXPECT_EQ(read(successor), "<timeout>");
}

// Puts both sides just before 2^32 messages: the futex words wrap there, the counts must not.
TEST(ShmRing, GoesOnPastTheWrapOfTheFutexWords) {
  constexpr size_t kWrittenAt = 64, kReleasedAt = 128, kSignalOffset = 8;
  constexpr uint64_t kStart = (uint64_t{1} << 32) - 50;
  constexpr auto kSignalStart = static_cast<uint32_t>(kStart);
  const Descriptor fd(3, 32);  // 3 does not divide 2^32: a wrapped count would change the slot
  for (const size_t at : {kWrittenAt, kReleasedAt}) {
    ASSERT_EQ(pwrite(fd, &kStart, 8, static_cast<off_t>(at)), 8);
    ASSERT_EQ(pwrite(fd, &kSignalStart, 4, static_cast<off_t>(at + kSignalOffset)), 4);
  }
  std::thread writer_thread([&] {
    ShmRing writer(fd);
    for (int i = 0; i < 200; ++i) {
      ASSERT_EQ(writer.push(bytes_of(std::to_string(i)), kPatience), Wait::kReady);
    }
  });
  ShmRing reader(fd);
  for (int i = 0; i < 200; ++i) ASSERT_EQ(read(reader, kPatience), std::to_string(i));
  writer_thread.join();
  uint64_t count = 0;
  uint32_t signal = 0;
  ASSERT_EQ(pread(fd, &count, 8, kWrittenAt), 8);
  ASSERT_EQ(pread(fd, &signal, 4, kWrittenAt + kSignalOffset), 4);
  EXPECT_EQ(count, kStart + 200);
  EXPECT_EQ(signal, kSignalStart + 200);  // modulo 2^32
}

}  // namespace
}  // namespace vllm_lite
