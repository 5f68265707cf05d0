//! The tests, generic over the transport.

pub mod faults;
pub mod flows;
pub mod lives;
pub mod mail;

use std::time::Duration;

/// Instantiates every test of this module for one harness.
#[macro_export]
macro_rules! suite_for {
    (@ $harness:ty: $($part:ident $test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let time = std::time::Duration::from_secs(120);
                tokio::time::timeout(time, $crate::suite::$part::$test::<$harness>()).await.unwrap();
            }
        )*
    };
    ($harness:ty) => {
        $crate::suite_for!(@ $harness:
            mail calls_are_answered_with_what_they_asked
            mail every_failure_has_its_own_error
            mail casts_keep_their_order_and_arrive_once
            mail a_cast_that_nobody_takes_is_told
            mail queues_are_bounded_in_bytes
            lives a_cast_to_a_peer_that_is_down_fails_at_once
            lives a_higher_incarnation_takes_over_at_once
            lives a_stale_incarnation_is_refused
            lives a_process_started_twice_does_not_keep_the_first_out
            lives another_cluster_or_schema_is_refused_by_name
            lives a_node_that_is_not_listed_is_refused
            lives a_short_partition_fails_no_call
            lives a_long_partition_fails_what_was_in_flight
            lives a_shutdown_is_seen_at_once
            lives the_supervisors_word_ends_a_peer_at_once
            lives two_that_dial_at_once_end_with_one_steady_link
            lives leases_come_from_the_head_and_run_out
            flows flows_keep_order_and_content
            flows a_flow_waits_for_its_reader
            flows a_flow_whose_reader_is_gone_says_so
            flows a_flow_reopens_after_the_link_was_lost
            flows frames_of_an_older_life_are_refused
            flows device_threads_can_block_on_flows
            flows both_ends_may_send_before_either_reads
            flows an_end_is_told_to_those_who_only_look
            flows tasks_and_threads_may_take_turns_at_a_flow
            flows bulk_does_not_hold_up_small_calls
            faults damaged_frames_lose_no_mail_and_double_none
            faults flows_under_damage_tell_the_truth_or_say_so
            faults repeated_frames_have_no_effect
            faults a_stalled_flow_holds_up_nothing_else
            faults a_link_that_never_holds_is_not_dialled_without_pause
            faults a_start_fails_as_often_as_the_plan_says
        );
    };
    // Where what is sent during a partition is lost.
    (lossy $harness:ty) => {
        $crate::suite_for!($harness);
        $crate::suite_for!(@ $harness: flows a_flow_whose_first_frame_was_lost_says_so);
    };
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
