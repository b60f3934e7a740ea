#!/bin/sh
# What the C++ tests need from the system: GoogleTest, Google Benchmark and valgrind; and ccache, which saves time. Installs
# them through apt when it may, else says in one line what is missing and needed.
set -eu
missing=""
have_file() { for file in "$@"; do [ -e "$file" ] && return 0; done; return 1; }
have_file /usr/include/gtest/gtest.h /usr/local/include/gtest/gtest.h || missing="$missing libgtest-dev"
have_file /usr/include/benchmark/benchmark.h /usr/local/include/benchmark/benchmark.h || missing="$missing libbenchmark-dev"
command -v valgrind >/dev/null || missing="$missing valgrind"
needed=$missing
command -v ccache >/dev/null || missing="$missing ccache"
[ -z "$missing" ] && exit 0
give_up() {
  [ -z "$needed" ] && exit 0
  echo "$1" >&2
  exit 1
}
run=""
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then run="sudo -n"; else
    give_up "Missing:$missing. Run: sudo apt-get install$missing"
  fi
fi
if ! command -v apt-get >/dev/null; then
  give_up "Missing:$missing, and there is no apt-get here: install them with your system's package manager."
fi
echo "== installing$missing"
install() {
  $run apt-get update -qq && DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $missing
}
install >/dev/null ||
  give_up "Missing:$missing, and apt-get could not install them (see above): install them and try again."
