fn float4(tile: u32, i: u32, lane: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(code_at(tile, i, lane));
}

fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let i = 8u * b;
    return Block(
        float4(tile, i, lane), float4(tile, i + 1u, lane),
        float4(tile, i + 2u, lane), float4(tile, i + 3u, lane),
        float4(tile, i + 4u, lane), float4(tile, i + 5u, lane),
        float4(tile, i + 6u, lane), float4(tile, i + 7u, lane),
    );
}
