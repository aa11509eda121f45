// A reference to a process group that may be dropped anywhere.
//
// The destructor of a gloo group joins the group's worker threads. A worker that lets go of what it has worked on may
// need Python's lock (GIL) for it: for a tensor that Python knows, or for the thread-local state that a collective
// launched in a backward pass carries. A completion, which runs in such a worker, may itself hold the last reference.
// So a thread that drops it with the GIL held would wait for a worker that waits for the GIL, and a worker would join
// itself. What is let go of here is therefore dropped in a thread of its own, which is neither.
//
// Python drops a module's Reducer with the GIL held, and the Reducer may be the last to hold its group: plain DDP hangs
// then. We hold the group, too, and with `let_go_after` ours is the last reference.
//
// From the interpreter's exit on nothing is dropped any more: a worker that asks a dying interpreter for the GIL takes
// the process down. In a forked child the workers do not exist, so what came from the parent is kept there.
// Thread-safety: everything but one object's own use may happen in any thread, with the GIL or without, under any lock.
#pragma once

#include <torch/custom_class.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>

namespace ddp_hooks {

using AnyGroup = c10::intrusive_ptr<torch::CustomClassHolder>;

// The parts of GroupReference that do not depend on the kind of group. `process` is the one that made the reference.
void let_go(AnyGroup group, pid_t process);
void let_go_after(AnyGroup group, std::weak_ptr<void> after, pid_t process);

// Waits until everything that was let go of is gone; false if it takes longer than `limit`. Call it without the GIL.
// What still waits for something else to go first does not count.
bool wait_until_gone(std::chrono::milliseconds limit);

// Keeps whatever is let go of from now on. Called at the interpreter's exit.
void keep_groups_from_now_on();
bool are_groups_kept();

template <typename Group>
class GroupReference {
 public:
  explicit GroupReference(c10::intrusive_ptr<Group> group) : group_(std::move(group)) {}
  ~GroupReference() { let_go(); }
  GroupReference(GroupReference&&) noexcept = default;
  GroupReference& operator=(GroupReference&&) = delete;
  GroupReference(const GroupReference&) = delete;
  GroupReference& operator=(const GroupReference&) = delete;

  // Null once it was let go of.
  Group* get() const { return group_.get(); }
  Group* operator->() const { return group_.get(); }
  Group& operator*() const { return *group_; }

  void let_go() {
    if (group_) ddp_hooks::let_go(std::move(group_), process_);
  }
  // Holds the group until `after` is gone and has let go of it.
  void let_go_after(std::weak_ptr<void> after) {
    if (group_) ddp_hooks::let_go_after(std::move(group_), std::move(after), process_);
  }

 private:
  c10::intrusive_ptr<Group> group_;
  pid_t process_ = getpid();
};

}  // namespace ddp_hooks
