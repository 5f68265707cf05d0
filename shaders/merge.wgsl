// What attention.wgsl and attention_merge.wgsl share: which keys a row sees, and how the results of two
// neighbouring runs of keys become one. Each result is a largest score, the sum of its shares (relative
// to that score) and the shares' sums of values.

const LOWEST = -3.0e38;
// Keys of a split: whole tiles, and the same for every adapter and every step.
const SPLIT = 256u;

// (factor of the first, factor of the second, largest score of both); `fresh`: there is no first.
fn merging(a: f32, b: f32, fresh: bool) -> vec3<f32> {
    if (fresh) {
        return vec3<f32>(0.0, 1.0, b);
    }
    let top = max(a, b);
    return vec3<f32>(exp_(a - top), exp_(b - top), top);
}

fn merged(m: vec3<f32>, a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    return fma(a, vec4<f32>(m.x), b * m.y);
}

// A row in the arena. It sees every key before `trunk`, and key trunk + i where bit i of `tree` is set;
// its own, at `slot`, is the last of them. A row of plain text is all trunk. In a tree of drafted
// tokens, whose branches lie in slots side by side, the bits are a node's ancestors and itself.
struct Row {
    slot: u32,
    // Arena offset of its block table.
    table: u32,
    trunk: u32,
    tree: u32,
}
const ROW_WORDS = 4u;
const NONE = 0xffffffffu;

fn row_at(at: u32) -> Row {
    return Row(arena[at], arena[at + 1u], arena[at + 2u], arena[at + 3u]);
}

// The first key within a window of so many (0: all). A window reaches back beyond the tree.
fn first_key(r: Row, window: u32) -> u32 {
    let end = r.trunk + countOneBits(r.tree);
    return select(0u, end - window, window != 0u && end > window);
}

fn sees(r: Row, key: u32) -> bool {
    let i = key - r.trunk;
    return key < r.trunk || (i < 32u && ((r.tree >> i) & 1u) != 0u);
}
