#include "reducer/bucket_views.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "reducer/gradient_report.h"

namespace ddp_hooks {
namespace {

// Behind each accumulator: the Reducer's and the engine's.
constexpr size_t kHooksOfOurs = 2;

// Whether the elements of `gradient` lie in memory as those of its view do, one flat stretch each.
bool lies_like(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.layout() == at::kStrided && gradient.scalar_type() == view.scalar_type() &&
         gradient.sizes() == view.sizes() && gradient.strides() == view.strides() &&
         gradient.is_non_overlapping_and_dense() && !gradient.is_conj() && !gradient.is_neg();
}

at::Tensor flat_and_real(const at::Tensor& dense) {
  const at::Tensor flat = dense.as_strided({dense.numel()}, {1});
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

}  // namespace

bool hands_on_unchanged(const torch::autograd::Node& accumulator, const at::Tensor& parameter) {
  const auto& before = accumulator.pre_hooks();
  return torch::autograd::impl::hooks(parameter).empty() && !torch::autograd::impl::post_acc_grad_hooks(parameter) &&
         std::all_of(before.begin(), before.end(), [](const auto& hook) { return GradientGuard::is_one(*hook); }) &&
         accumulator.post_hooks().size() <= kHooksOfOurs;
}

BucketViews::BucketViews(const ReducerView& reducer)
    : reducer_(reducer), copies_in_batches_(reducer.copies_in_batches()) {
  forget();
}

void BucketViews::forget() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (is_detached(i) && !reducer_.bucket_view(i).variable.is_same(reducer_.parameters()[i])) restore(i);
  }
  entries_.assign(reducer_.parameters().size(), Entry{});
}

void BucketViews::detach(size_t parameter) {
  Entry& entry = entries_[parameter];
  if (entry.detached) return;
  if (!entry.variable.defined()) {
    const BucketView place = reducer_.bucket_view(parameter);
    if (place.sparse) return;
    // A view of the bucket, because with gradient_as_bucket_view=True the Reducer insists that gradients alias it.
    entry.view = place.bucket.narrow(0, place.offset, 0);
    entry.variable = at::empty({0}, place.bucket.options());
    // Defined, because to the Reducer a parameter that reports without a gradient was not used.
    entry.variable.mutable_grad() = reducer_.gradients_are_views() ? entry.view : at::empty_like(entry.view);
  }
  exchange(parameter);
}

bool BucketViews::is_detached(size_t parameter) const {
  return entries_[parameter].detached;
}

void BucketViews::exchange(size_t parameter) {
  Entry& entry = entries_[parameter];
  const BucketView place = reducer_.bucket_view(parameter);
  std::swap(place.variable, entry.variable);
  std::swap(*place.view, entry.view);
  entry.detached = !entry.detached;
}

void BucketViews::restore(size_t parameter) {
  if (entries_[parameter].detached) exchange(parameter);
}

void BucketViews::detach_all() {
  note_gradients();
  for (size_t i = 0; i < entries_.size(); ++i) detach(i);
}

void BucketViews::restore_all() {
  note_gradients();
  for (size_t i = 0; i < entries_.size(); ++i) restore(i);
}

void BucketViews::fill(size_t parameter) {
  restore(parameter);
  const BucketView place = reducer_.bucket_view(parameter);
  at::Tensor& gradient = place.variable.mutable_grad();
  if (!gradient.defined()) {
    place.view->zero_();
  } else if (!gradient.is_alias_of(*place.view)) {
    place.view->copy_(gradient);
    if (reducer_.gradients_are_views()) gradient = *place.view;
  }
}

at::Tensor BucketViews::find_to_read(size_t parameter) const {
  const Entry& entry = entries_[parameter];
  const at::Tensor& gradient = reducer_.parameters()[parameter].grad();
  const bool is_found = entry.detached && gradient.defined() && lies_like(gradient, entry.view);
  return is_found ? flat_and_real(gradient.detach()) : at::Tensor();
}

at::Tensor BucketViews::find(size_t parameter) const {
  return reducer_.gradients_are_views() ? at::Tensor() : find_to_read(parameter);
}

at::Tensor BucketViews::find_or_fill(size_t parameter) {
  at::Tensor gradient = find(parameter);
  if (!gradient.defined()) fill(parameter);
  return gradient;
}

at::Tensor BucketViews::find_own_or_fill(size_t parameter) {
  const bool others_hear_of_it = reducer_.accumulators()[parameter]->post_hooks().size() > kHooksOfOurs;
  if (!others_hear_of_it && !shares_memory(parameter)) return find_or_fill(parameter);
  fill(parameter);
  return {};
}

bool BucketViews::shares_memory(size_t parameter) const {
  const at::Tensor& gradient = reducer_.parameters()[parameter].grad();
  if (!gradient.defined() || !gradient.has_storage()) return false;
  // Of memory that is not ATen's own, another storage may know.
  if (!gradient.storage().resizable()) return true;
  // The accumulator that is at work, within which a bucket becomes ready, holds what it has made .grad of.
  const auto at_work = torch::autograd::get_current_node();
  const bool is_at_work = at_work && at_work.get() == reducer_.accumulators()[parameter].get();
  return gradient.storage().use_count() > (is_at_work ? 2 : 1);
}

bool BucketViews::is_as_autograd_left_it(size_t parameter) const {
  return hands_on_unchanged(*reducer_.accumulators()[parameter], reducer_.parameters()[parameter]);
}

at::Tensor BucketViews::place(size_t parameter) const {
  return flat_and_real(entries_[parameter].view);
}

void BucketViews::note_gradients() {
  if (!reducer_.gradients_are_views()) return;
  const std::vector<at::Tensor>& parameters = reducer_.parameters();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!parameters[i].is_cpu()) continue;
    const at::Tensor& gradient = parameters[i].grad();
    // What has no memory yet gets memory of its own.
    const at::Tensor* view = is_detached(i) ? &entries_[i].view : reducer_.bucket_view(i).view;
    entries_[i].gradient_in_bucket =
        view && gradient.defined() && gradient.layout() == at::kStrided && gradient.is_alias_of(*view);
  }
}

bool BucketViews::is_averaged_by_division(size_t parameter) const {
  const at::Tensor& variable = reducer_.parameters()[parameter];
  // On CUDA, and complex numbers anywhere, ATen divides by a number by multiplying with its reciprocal. Batches are
  // divided as flat buckets of real numbers.
  if (!variable.is_cpu()) return false;
  return copies_in_batches_ || (entries_[parameter].gradient_in_bucket && !variable.is_complex());
}

}  // namespace ddp_hooks
