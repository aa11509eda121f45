#include "reducer/unused_parameters.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace ddp_hooks {

UnusedParameters::UnusedParameters(const ReducerView& reducer, const std::vector<at::Tensor>& unmanaged,
                                   const std::vector<std::string>& names, const std::vector<size_t>& pending)
    : reducer_(reducer),
      reduced_count_(reducer.parameters().size()),
      parameters_(reducer.parameters()),
      names_(names),
      armed_(std::make_shared<UsageMask>(reduced_count_)) {
  parameters_.insert(parameters_.end(), unmanaged.begin(), unmanaged.end());
  declared_ = taken_back_ = unused_ = accumulated_ = taken_up_ = UsageMask(parameters_.size());
  unmanaged_taken_up();
  for (size_t i : pending) accumulated_.set(i);
}

void UnusedParameters::declare(const std::vector<size_t>& parameters) {
  declared_ = UsageMask(parameters_.size());
  for (size_t index : parameters) declared_.set(index);
}

void UnusedParameters::synchronising_forward_done(int64_t number) {
  forward_number_ = number;
  unused_ = declared_;
  taken_back_ = UsageMask(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) unused_.set(i);
  }
  checked_ = false;
  prepared_ = false;
  marks_.clear();
  pass_ended();
}

void UnusedParameters::accumulating_forward_done() {
  marks_.clear();
  pass_ended();
}

void UnusedParameters::watch_unmanaged(const std::function<void(size_t)>& report) {
  for (size_t i = reduced_count_; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad() || unmanaged_reports_.count(i) > 0) continue;
    unmanaged_reports_.try_emplace(i, torch::autograd::impl::grad_accumulator(parameters_[i]),
                                   [report, i] { report(i); });
  }
}

bool UnusedParameters::has_accumulated(size_t parameter) const {
  // Nobody reports an unmanaged one after a forward pass that could not be watched. One that is still frozen has only
  // what was left there, or what other ranks have made here.
  const bool unreported = parameter >= reduced_count_ && unmanaged_reports_.count(parameter) == 0 &&
                          (parameters_[parameter].requires_grad() || !taken_up_.test(parameter));
  return (accumulated_.test(parameter) || unreported) && parameters_[parameter].grad().defined();
}

std::vector<size_t> UnusedParameters::pending() const {
  std::vector<size_t> pending;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool noted_by_reducer = i < reduced_count_ && reducer_.used_since_synchronised(i);
    if (has_accumulated(i) || (noted_by_reducer && parameters_[i].grad().defined())) pending.push_back(i);
  }
  return pending;
}

void UnusedParameters::unmanaged_taken_up() {
  for (size_t i = reduced_count_; i < parameters_.size(); ++i) {
    accumulated_.clear(i);
    taken_up_.set(i);
  }
}

void UnusedParameters::forget_unless_of(int64_t number) {
  if (forward_number_ != number) unused_ = UsageMask(parameters_.size());
}

void UnusedParameters::check_declarations(int64_t reports) {
  if (checked_) return;
  checked_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!unused_.test(i) || !parameters_[i].requires_grad() || !is_in_a_graph(i, reports)) continue;
    unused_.clear(i);
    taken_back_.set(i);
  }
}

bool UnusedParameters::is_in_a_graph(size_t parameter, int64_t reports) const {
  if (parameter < reduced_count_) {
    return reducer_.is_in_a_graph(parameter, reports + static_cast<int64_t>(guards_.count(parameter)));
  }
  // Nobody but graphs and the report holds the accumulator of a parameter that the Reducer does not know, and this.
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters_[parameter]);
  const auto ours = static_cast<int64_t>(1 + unmanaged_reports_.count(parameter));
  return accumulator && static_cast<int64_t>(accumulator.use_count()) > ours;
}

bool UnusedParameters::has_nothing_to_send(size_t parameter) const {
  return unused_.test(parameter) && !has_accumulated(parameter);
}

bool UnusedParameters::is_complete() const {
  for (size_t i = 0; i < reduced_count_; ++i) {
    if (!unused_.test(i)) return false;
  }
  return true;
}

bool UnusedParameters::prepare_marks() {
  // The outputs of a forward pass may be gone back from one by one, and nobody knows which comes last.
  if (prepared_) return taken_back_.count() > 0;
  prepared_ = true;
  for (size_t i = 0; i < reduced_count_; ++i) {
    if (!unused_.test(i)) continue;
    marks_.push_back(i);
    if (parameters_[i].requires_grad()) guard(i);
  }
  return !marks_.empty() || taken_back_.count() > 0;
}

std::vector<size_t> UnusedParameters::take_marks(int64_t number) {
  std::vector<size_t> taken;
  taken.swap(marks_);
  if (number != forward_number_) taken.clear();
  return taken;
}

std::vector<size_t> UnusedParameters::unready_parameters(int64_t number) const {
  if (number != forward_number_) return {};
  std::vector<size_t> awaited = reducer_.awaited();
  for (size_t index : awaited) {
    if (!taken_back_.test(index)) return {};
  }
  return awaited;
}

void UnusedParameters::guard(size_t parameter) {
  armed_->set(parameter);
  if (guards_.count(parameter) > 0) return;
  guards_.try_emplace(parameter, reducer_.accumulators()[parameter],
                      [armed = armed_, parameter, name = names_[parameter]] {
                        TORCH_CHECK(!armed->test(parameter), "ddp_hooks: parameter '", name,
                                    "' was declared unused but received a gradient: expected the forward pass not "
                                    "to use it. Declare only parameters that it does not use, or wrap with "
                                    "find_unused_parameters=True");
                      });
}

void UnusedParameters::step_closed() {
  unused_ = UsageMask(parameters_.size());
  // Gradients of unmanaged parameters may come after the step has closed, and are averaged later still.
  for (size_t i = 0; i < reduced_count_; ++i) accumulated_.clear(i);
}

void UnusedParameters::pass_ended() {
  *armed_ = UsageMask(reduced_count_);
}

}  // namespace ddp_hooks
