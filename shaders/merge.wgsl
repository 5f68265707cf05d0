// How the results of two neighbouring runs of keys become one. Each is a largest score, the sum of
// its shares (relative to that score) and the shares' sums of values.

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
