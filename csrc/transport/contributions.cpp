#include "transport/contributions.h"

#include <algorithm>

namespace ddp_hooks {

const at::Tensor& one_of(const Places& places) {
  return std::find_if(places.begin(), places.end(), [](const Place& place) { return place.flat.defined(); })->flat;
}

void keep_for_stream(const Places& places) {
  for (const Place& place : places) keep_for_stream(place.flat);
}

size_t count_parts(const std::vector<DirectGroup>& groups) {
  size_t count = 0;
  for (const DirectGroup& group : groups) count += group.parts.size();
  return count;
}

}  // namespace ddp_hooks
