#include "absence.h"

#include <c10/util/Exception.h>

namespace ddp_hooks {

Absence::Absence(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)),
      declared_(parameters_.size()),
      absent_(parameters_.size()),
      accumulated_(parameters_.size()),
      guarded_(parameters_.size()),
      armed_(std::make_shared<UsageMask>(parameters_.size())) {}

Absence::~Absence() {
  disarm();
}

void Absence::declare(const std::vector<size_t>& parameters) {
  declared_ = UsageMask(parameters_.size());
  for (size_t index : parameters) declared_.set(index);
}

void Absence::synchronising_forward_done(int64_t number) {
  forward_number_ = number;
  absent_ = declared_;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) absent_.set(i);
  }
  taken_ = false;
}

void Absence::accumulating_forward_done() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].requires_grad()) accumulated_.set(i);
  }
}

void Absence::forget_unless_of(int64_t number) {
  if (forward_number_ != number) absent_ = UsageMask(parameters_.size());
}

bool Absence::has_nothing_to_send(size_t parameter) const {
  return absent_.test(parameter) && !(accumulated_.test(parameter) && parameters_[parameter].grad().defined());
}

std::vector<size_t> Absence::take_to_mark(size_t count, const std::vector<std::string>& names) {
  std::vector<size_t> taken;
  if (taken_) return taken;
  taken_ = true;
  disarm();
  for (size_t i = 0; i < count; ++i) {
    if (!absent_.test(i)) continue;
    taken.push_back(i);
    if (parameters_[i].requires_grad()) guard(i, names[i]);
  }
  return taken;
}

void Absence::guard(size_t parameter, const std::string& name) {
  armed_->set(parameter);
  if (guarded_.test(parameter)) return;
  guarded_.set(parameter);
  parameters_[parameter].register_hook([armed = armed_, parameter, name](const at::Tensor& gradient) {
    TORCH_CHECK(!armed->test(parameter) || !gradient.defined(), "ddp_hooks: parameter '", name,
                "' was declared unused and received a gradient: expected it not to take part in the forward pass. "
                "Declare only what is left out, or wrap with find_unused_parameters=True");
  });
}

void Absence::step_closed() {
  absent_ = UsageMask(parameters_.size());
  accumulated_ = UsageMask(parameters_.size());
  disarm();
}

void Absence::disarm() {
  *armed_ = UsageMask(parameters_.size());
}

}  // namespace ddp_hooks
