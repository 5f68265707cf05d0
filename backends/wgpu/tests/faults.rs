//! What serves fault injection and integrity checks.

mod common;

use common::*;
use dunlin_backend::KvDtype;
use dunlin_suite::faults;

#[test]
fn a_flipped_weight_changes_the_sum_and_flips_back() {
    faults::flips_weights(device());
}

#[test]
fn a_flipped_kv_bit_is_that_of_its_token_and_a_block_can_be_put_back() {
    faults::flips_kv(device());
}

#[test]
fn narrower_entries_flip_at_their_upper_bits_and_can_be_put_back() {
    for kv in [KvDtype::F16, KvDtype::Int8] {
        faults::flips_narrow_kv(keeping(kv));
    }
}
