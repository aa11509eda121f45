#include "engine/prelude.h"

#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

namespace ddp_hooks {
namespace {

// How often the engine watches each of the Reducer's parameters.
constexpr int64_t kReportsPerParameter = 1;

}  // namespace

bool is_restricted_pass() {
  const auto* restricted = torch::autograd::get_current_graph_task_exec_info();
  return restricted != nullptr && !restricted->empty();
}

Prelude::Prelude(const ReducerView& reducer, BucketSlots& slots, const CurrentLayout& layout,
                 const std::vector<at::Tensor>& late, const std::vector<std::string>& names,
                 const std::vector<size_t>& pending, std::shared_ptr<const ControlGroups> groups,
                 const AgreementSettings& settings, UsageAgreement::Objections objections,
                 ExchangeStatistics& statistics)
    : reducer_(reducer),
      slots_(slots),
      layout_(layout),
      names_(names),
      absence_(reducer, late, names, pending),
      agreement_(reducer, absence_, names.size(), std::move(groups), settings, std::move(objections), statistics) {}

void Prelude::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises,
                           const std::function<void()>& reached, const std::function<void(size_t)>& late_reported) {
  absence_.watch_late(late_reported);
  if (!synchronises) return absence_.accumulating_forward_done();
  const int64_t number = reducer_.forward_passes();
  absence_.synchronising_forward_done(number);
  outputs_.watch(outputs, number, reached);
}

bool Prelude::outputs_reached(bool takes_gradients) {
  if (!reducer_.expects_backward() || reducer_.learns_static_graph()) return false;
  absence_.forget_unless_of(reducer_.forward_passes());
  // Some parameters may have reported before the outputs were reached, if the loss uses them directly.
  const bool begins = !reducer_.in_backward();
  if (is_restricted_pass()) {
    if (begins) slots_.give_all_back();
    return false;
  }
  absence_.check_declarations(kReportsPerParameter);
  if (!reaches_reducer()) {
    // The Reducer will not begin, and so would never ask for gradients that it does not know.
    for (size_t i = reducer_.parameters().size(); i < names_.size(); ++i) {
      TORCH_CHECK(absence_.has_nothing_to_send(i), "ddp_hooks: parameter '", names_[i],
                  "' was thawed after DDP's Reducer had been made without it, and nothing that the Reducer knows is "
                  "used beside it: call ddp_hooks.rebuild(ddp) after thawing");
    }
    return false;
  }
  if (begins) {
    start_exchange();
    takes_gradients ? slots_.vacate_all() : slots_.give_all_back();
  }
  return !reducer_.searches_graph() && absence_.prepare_marks();
}

bool Prelude::reaches_reducer() const {
  return reducer_.searches_graph() ? reducer_.reaches_parameters() : !absence_.is_complete();
}

// Started here and not with the first bucket, so that it is under way before any rank can come to wait for it, whatever
// else the ranks wait for in their backward passes. It must not be started for a pass that never reaches the buckets,
// because the other ranks would not take part.
void Prelude::start_exchange() {
  if (!agreement_.awaits_start()) return;
  try {
    agreement_.start(layout_.hash());
  } catch (...) {
    agreement_.fail(std::current_exception());
  }
}

std::vector<size_t> Prelude::take_marks() {
  return absence_.take_marks(reducer_.forward_passes());
}

std::vector<size_t> Prelude::overdue() const {
  return reducer_.in_backward() ? absence_.overdue(reducer_.forward_passes()) : std::vector<size_t>();
}

AgreedUsage Prelude::first_bucket_ready(bool shadow) {
  absence_.forget_unless_of(reducer_.forward_passes());
  return agreement_.agree(shadow, layout_.hash());
}

bool Prelude::awaits_backward() const {
  return reducer_.expects_backward() && outputs_.may_come(reducer_.forward_passes());
}

}  // namespace ddp_hooks
