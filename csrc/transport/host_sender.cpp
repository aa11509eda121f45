#include "transport/host_sender.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "plan/shares.h"
#include "transport/collectives.h"

namespace ddp_hooks {

// One message under way, as the ranks of a host see it.
class HostSender::Message {
 public:
  Message(OutgoingMessage outgoing, const Topology& topology, int rank, Staging& staging)
      : launch_(std::move(outgoing.launch)),
        places_(std::move(outgoing.places)),
        host_(topology.host_of(rank)),
        position_(static_cast<size_t>(topology.position_in_host(rank))),
        element_bytes_(element_bytes_of(places_)),
        message_(std::move(outgoing.message)),
        shares_(divide_among(topology.ranks_per_host(), message_, element_bytes_)) {
    int64_t most = 0;
    for (const Share& share : shares_) {
      most = std::max(most, share.between_hosts.numel);
      int64_t contributed = 0;
      for (const DirectPart& part : share.parts) contributed += contains(part.contributors, host_) ? part.length : 0;
      sent_bytes_.push_back(contributed * element_bytes_);
    }
    constexpr int64_t kAlignment = sizeof(int64_t);
    room_bytes_ = (most * element_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    const at::TensorOptions bytes = one_of(places_).options().dtype(at::kByte);
    pack_contributions(staging, bytes);
    received_bytes_.assign(shares_.size(), sent_bytes_[position_]);
    received_ = staging.take(*launch_.step, sent_bytes_[position_] * count(), bytes);
    results_ = staging.take(*launch_.step, slot_bytes() * count(), bytes);
    if (message_.is_coded) travelled(position_) = {};
  }

  const Launch& launch() const { return launch_; }
  c10::Device device() const { return results_.device(); }
  const Share& own_share() const { return shares_[position_]; }

  // Where the share lies while it is between hosts.
  Places place_of_share() const { return {Place{share(position_)}}; }

  template <typename Group>
  OrderedGroup::WorkPointer start_contributions(Group& group) {
    return all_to_all(group, received_, sent_, received_bytes_, sent_bytes_);
  }

  // The contributions of this host to this rank's share, of which each rank has sent as much.
  void add_up() const {
    RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
    const at::Tensor own = share(position_);
    std::vector<SliceSum> sums;
    int64_t filled = 0, taken = 0;
    for (const DirectPart& part : own_share().parts) {
      if (contains(part.contributors, host_)) {
        SliceSum& sum = sums.emplace_back();
        sum.to = {&own, filled, part.length};
        for (int64_t from = 0; from < count(); ++from) {
          sum.contributions.push_back({from * sent_bytes_[position_] + taken, false});
        }
        taken += part.length * element_bytes_;
      }
      filled += part.length;
    }
    if (!sums.empty()) sum_contributions(received_, sums);
    keep_for_stream(results_);
  }

  // What this rank's share took between hosts. How many bytes are coded all ranks are told, so that they count alike.
  void note(int64_t sent_bytes, const Travelled& coded = {}) {
    sent_bytes_between_ = sent_bytes;
    if (message_.is_coded) travelled(position_) = coded;
  }

  template <typename Group>
  OrderedGroup::WorkPointer start_results(Group& group) {
    return all_gather(group, results_, results_.narrow(0, begin_of(position_), slot_bytes()));
  }

  void put_back() const {
    if (launch_.step->has_failed) return;
    RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
    for (size_t i = 0; i < shares_.size(); ++i) {
      if (shares_[i].between_hosts.numel == 0) continue;
      std::vector<BorrowedSlice> to;
      to.reserve(shares_[i].parts.size());
      for (const DirectPart& part : shares_[i].parts) to.push_back(places_[part.place].slice(part));
      scatter(share(i).narrow(0, 0, shares_[i].between_hosts.numel), to);
    }
    keep_for_stream(places_);
  }

  void count(LateStatistics& counted) const {
    MessageStatistics more;
    more.messages = message_.is_summed() ? 4 : 3;
    more.sent_bytes = sent_bytes_between_;
    if (message_.is_coded) {
      const size_t sizes = message_.is_summed() ? message_.for_all_bytes.size() : 1;
      more.size_bytes = static_cast<int64_t>(sizes * sizeof(int64_t));
    }
    counted.add(more);
    Travelled all;
    for (size_t i = 0; message_.is_coded && i < shares_.size(); ++i) all += travelled(i);
    counted.add_payload(message_, element_bytes_, all);
  }

  int64_t turn_of_results = 0;

 private:
  int64_t count() const { return static_cast<int64_t>(shares_.size()); }

  // A share, and if it is coded, what it took.
  int64_t slot_bytes() const { return room_bytes_ + (message_.is_coded ? int64_t{sizeof(Travelled)} : 0); }
  int64_t begin_of(size_t position) const { return static_cast<int64_t>(position) * slot_bytes(); }
  at::Tensor share(size_t position) const {
    return results_.narrow(0, begin_of(position), room_bytes_).view(one_of(places_).scalar_type());
  }
  Travelled& travelled(size_t position) const {
    return *reinterpret_cast<Travelled*>(results_.mutable_data_ptr<uint8_t>() + begin_of(position) + room_bytes_);
  }

  void pack_contributions(Staging& staging, const at::TensorOptions& options) {
    RECORD_FUNCTION("ddp_hooks::pack", std::vector<c10::IValue>());
    int64_t bytes = 0;
    std::vector<PackedSlice> slices;
    for (size_t i = 0; i < shares_.size(); ++i) {
      bytes += sent_bytes_[i];
      for (const DirectPart& part : shares_[i].parts) {
        if (!contains(part.contributors, host_)) continue;
        const Place& place = places_[part.place];
        slices.push_back({place.slice(part), place.divisor, place.divides});
      }
    }
    sent_ = staging.take(*launch_.step, bytes, options);
    pack(sent_, slices);
  }

  const Launch launch_;
  const Places places_;
  const int host_;
  const size_t position_;  // of this rank among those of its host
  const int64_t element_bytes_;
  const DirectMessage message_;
  const std::vector<Share> shares_;  // by position
  int64_t room_bytes_ = 0;           // for each share in `results_`
  std::vector<int64_t> sent_bytes_;  // by position
  std::vector<int64_t> received_bytes_;
  at::Tensor sent_;
  at::Tensor received_;
  at::Tensor results_;
  int64_t sent_bytes_between_ = 0;
};

void HostSender::send(OutgoingMessage outgoing) {
  if (on_streams_) return send_on_streams(std::move(outgoing));
  const Groups groups = control_groups_;
  const Topology& topology = groups->topology();
  const std::shared_ptr<StepInFlight> step = outgoing.launch.step;
  const auto message = std::make_shared<Message>(std::move(outgoing), topology, rank_, staging_);
  const auto work = message->start_contributions(groups->shares());
  // From here on nothing fails before all turns are used, or given up.
  std::shared_ptr<StepwiseMessage> between;
  if (message->own_share().between_hosts.numel > 0) {
    between =
        std::make_shared<StepwiseMessage>(step, message->own_share().between_hosts, message->place_of_share(),
                                          topology.host_of(rank_), topology.ranks_at(topology.position_in_host(rank_)),
                                          [message, counted = counted_, held = std::weak_ptr(groups)](
                                              const StepwiseMessage& share, const std::exception_ptr& error) {
                                            const Groups open = held.lock();
                                            if (error || !open) return fail(message, open, error);
                                            message->note(share.sent_bytes(), share.travelled());
                                            send_results(message, open, counted);
                                          });
    between->take_turns(*groups, true);
  } else if (message->own_share().between_hosts.is_coded) {
    ++step->coded_messages;  // as on the other ranks
  }
  message->turn_of_results = groups->results().take_turn();
  // Until it is back as a whole, it counts as under way.
  *step->messages_not_back += 1;
  when_back(
      work, c10::kCPU, step,
      [message, between, groups, counted = counted_](c10::ivalue::Future&) {
        message->add_up();
        between ? between->send(groups) : send_results(message, groups, counted);
      },
      [message, groups](const std::exception_ptr& error) {
        if (error) fail(message, groups, error);
      });
}

void HostSender::send_results(const MessagePointer& message, const Groups& groups,
                              const std::shared_ptr<LateStatistics>& counted) {
  in_turn(
      groups->results(), message->turn_of_results, message->launch().step, groups,
      [message](c10d::Backend& backend) { return message->start_results(backend); },
      [message, counted](const Groups&) {
        message->put_back();
        message->count(*counted);
        *message->launch().step->messages_not_back -= 1;
      },
      [message](const Groups& open, const std::exception_ptr& error) {
        error ? fail(message, open, error) : end_message(message->launch(), nullptr);
      });
}

// Completions run here and now, one within the other: all of this is over when it returns.
void HostSender::send_on_streams(OutgoingMessage outgoing) {
  const HostsOnStreams& hosts = *on_streams_;
  const auto message = std::make_shared<Message>(std::move(outgoing), hosts.topology(), rank_, staging_);
  const auto contributions = message->start_contributions(hosts.within());
  check_is_complete(*contributions, hosts.within(), message->device());
  MessageStatistics between;
  std::exception_ptr failure;
  const auto note_failure = [&](const std::exception_ptr& error) {
    if (error) failure = error;
  };
  const auto send_results = [&] {
    message->note(between.sent_bytes);
    when_back(message->start_results(hosts.within()), message->device(), message->launch(),
              [message, counted = counted_](c10::ivalue::Future&) {
                message->put_back();
                message->count(*counted);
              });
  };
  when_back(
      contributions, message->device(), message->launch().step,
      [&](c10::ivalue::Future&) {
        message->add_up();
        const DirectMessage& share = message->own_share().between_hosts;
        if (share.numel == 0) return send_results();
        const OnEnd ended = [&](const std::exception_ptr& error) { error ? note_failure(error) : send_results(); };
        DirectSender(hosts.between(), true, control_groups_, staging_, between)
            .send({{message->launch().step, {}, ended}, share, message->place_of_share()});
      },
      note_failure);
  // The other ranks are ahead of this one, which must not send them anything else.
  if (failure) std::rethrow_exception(failure);
}

// The turns that it has taken will not be used, and others wait for what it would have sent.
void HostSender::fail(const MessagePointer& message, const Groups& groups, const std::exception_ptr& error) {
  const std::exception_ptr reason =
      error ? error : std::make_exception_ptr(std::runtime_error("ddp_hooks: the state was closed during a step"));
  end_message(message->launch(), groups ? groups->fail(reason) : reason);
}

}  // namespace ddp_hooks
