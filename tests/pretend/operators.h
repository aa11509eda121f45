// What runs on the pretended device, for the process group and the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "memory.h"

namespace pretend {

// A CPU tensor at the same address, which holds nothing alive.
at::Tensor as_cpu(const at::Tensor& tensor);

void put_on_current_stream(const std::string& name, const std::vector<Use>& uses, std::function<void()> act);
void synchronize_current_stream();

}  // namespace pretend
