#include "core/intrusive_list.h"

#include <gtest/gtest.h>

#include <vector>

namespace vllm_lite {
namespace {

struct Item {
  int value = 0;
  ListHook hook;
  ListHook other_hook;
};
using List = IntrusiveList<Item, &Item::hook>;
using OtherList = IntrusiveList<Item, &Item::other_hook>;

template <typename L>
std::vector<int> forward(const L& list) {
  std::vector<int> values;
  for (const Item* item = list.front(); item != nullptr; item = list.next(item)) {
    values.push_back(item->value);
  }
  return values;
}

template <typename L>
std::vector<int> backward(const L& list) {
  std::vector<int> values;
  for (const Item* item = list.back(); item != nullptr; item = list.prev(item)) {
    values.push_back(item->value);
  }
  return values;
}

TEST(IntrusiveList, IsEmptyAtFirst) {
  List list;
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.size(), 0u);
  EXPECT_EQ(list.front(), nullptr);
  EXPECT_EQ(list.back(), nullptr);
}

TEST(IntrusiveList, KeepsTheOrderOfInsertionAtBothEndsAndInTheMiddle) {
  Item items[4] = {{1, {}, {}}, {2, {}, {}}, {3, {}, {}}, {4, {}, {}}};
  List list;
  list.push_back(&items[1]);
  list.push_back(&items[3]);
  list.push_front(&items[0]);
  list.insert_before(&items[3], &items[2]);
  EXPECT_EQ(forward(list), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(backward(list), (std::vector<int>{4, 3, 2, 1}));
  EXPECT_EQ(list.size(), 4u);
}

TEST(IntrusiveList, InsertBeforeNothingMeansAtTheEnd) {
  Item items[2] = {{1, {}, {}}, {2, {}, {}}};
  List list;
  list.insert_before(nullptr, &items[0]);
  list.insert_before(nullptr, &items[1]);
  EXPECT_EQ(forward(list), (std::vector<int>{1, 2}));
}

TEST(IntrusiveList, ErasesAnywhereAndSaysWhoIsLinked) {
  Item items[3] = {{1, {}, {}}, {2, {}, {}}, {3, {}, {}}};
  List list;
  for (Item& item : items) list.push_back(&item);
  list.erase(&items[1]);
  EXPECT_FALSE(items[1].hook.linked());
  EXPECT_TRUE(items[0].hook.linked());
  EXPECT_EQ(forward(list), (std::vector<int>{1, 3}));
  list.erase(&items[0]);
  list.erase(&items[2]);
  EXPECT_TRUE(list.empty());
  list.push_back(&items[1]);
  EXPECT_EQ(forward(list), (std::vector<int>{2}));
}

TEST(IntrusiveList, AnElementIsInOneListPerHook) {
  Item items[2] = {{1, {}, {}}, {2, {}, {}}};
  List list;
  OtherList other;
  list.push_back(&items[0]);
  list.push_back(&items[1]);
  other.push_back(&items[1]);
  other.push_back(&items[0]);
  EXPECT_EQ(forward(list), (std::vector<int>{1, 2}));
  EXPECT_EQ(forward(other), (std::vector<int>{2, 1}));
  list.erase(&items[0]);
  EXPECT_EQ(forward(other), (std::vector<int>{2, 1}));
}

}  // namespace
}  // namespace vllm_lite
