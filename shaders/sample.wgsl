// Drawing a token from each row of logits, as backends/core/src/draw.rs has it: what its kernels
// share. Logits are read as words and compared as whole numbers, since drivers may take it that no
// float is NaN or infinite, and that is just what is to be found out.

const NONE = 0xffffffffu;
const MINUS_INFINITY = 0xff800000u;

// Orders floats as whole numbers. Both zeros are equal.
fn order(bits: u32) -> u32 {
    let plain = select(bits, 0u, bits == 0x80000000u);
    return select(plain | 0x80000000u, ~plain, (plain & 0x80000000u) != 0u);
}

// The float that `order` made a number of.
fn ordered(key: u32) -> u32 {
    return select(~key, key ^ 0x80000000u, (key & 0x80000000u) != 0u);
}

fn is_finite(bits: u32) -> bool {
    return (bits & 0x7f800000u) != 0x7f800000u;
}
