//! A fast sum over bytes in memory, to notice that they have changed.

/// Not cryptographic. A change of any one 8-byte word always changes the sum, since each word goes
/// through a bijection of its lane; the four lanes run side by side at the speed of memory.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut lanes = SEEDS;
    let chunks = bytes.chunks_exact(32);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(8)) {
            *lane = mix(*lane, word);
        }
    }
    let mut sum = (bytes.len() as u64).wrapping_mul(ODD);
    for part in rest.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        sum = mix(sum, &word);
    }
    lanes.iter().fold(sum, |sum, lane| (sum.rotate_left(23) ^ lane).wrapping_mul(ODD))
}

/// Fractional digits of pi.
const SEEDS: [u64; 4] =
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
/// Of the golden ratio.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline(always)]
fn mix(lane: u64, word: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole.copy_from_slice(word);
    (lane ^ u64::from_le_bytes(whole)).wrapping_mul(ODD).rotate_left(29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_the_length_count() {
        let bytes: Vec<u8> = (0..203).map(|i| (i * 37 % 251) as u8).collect();
        let whole = checksum(&bytes);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                assert_ne!(checksum(&changed), whole, "bit {bit} of byte {at}");
            }
        }
        for length in 0..bytes.len() {
            assert_ne!(checksum(&bytes[..length]), whole, "{length} bytes");
        }
        assert_ne!(checksum(&[0; 32]), checksum(&[0; 64]));
    }
}
