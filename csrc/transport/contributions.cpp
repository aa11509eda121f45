#include "transport/contributions.h"

#include <algorithm>

namespace ddp_hooks {

const at::Tensor& one_of(const Places& places) {
  return std::find_if(places.begin(), places.end(), [](const Place& place) { return place.flat.defined(); })->flat;
}

size_t count_parts(const std::vector<DirectGroup>& groups) {
  size_t count = 0;
  for (const DirectGroup& group : groups) count += group.parts.size();
  return count;
}

}  // namespace ddp_hooks
