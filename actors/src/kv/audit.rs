//! The KV invariants, checked from scratch.

use super::core::Kv;

impl Kv {
    /// Every invariant of the pool and its tables; `Err` lists what is wrong. O(blocks).
    pub fn audit(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        let usage = self.usage();
        let mut holders = vec![0; usage.total as usize];
        for (&id, count) in &self.copying {
            holders[id as usize] += count;
        }
        for (slot, table) in self.tables.iter().enumerate() {
            let Some(table) = table else { continue };
            for &id in &table.blocks {
                holders[id as usize] += 1;
            }
            let (have, need) = (table.blocks.len() as u32, self.blocks_for(table.written));
            if have != need {
                let written = table.written;
                wrong.push(format!("table {slot}: {have} blocks for {written} tokens, not {need}"));
            }
            let mut sorted = table.blocks.clone();
            sorted.sort_unstable();
            sorted.dedup();
            if sorted.len() != table.blocks.len() {
                wrong.push(format!("table {slot} names a block twice: {:?}", table.blocks));
            }
        }
        self.pool.audit(&holders, &mut wrong);
        let held = holders.iter().filter(|&&count| count > 0).count() as u32;
        if held != usage.live || usage.free + usage.cached + usage.live != usage.total {
            wrong.push(format!("{held} blocks are held; the counts say {usage:?}"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Live tables; 0 when no sequence runs.
    pub fn open_tables(&self) -> usize {
        self.tables.iter().flatten().count()
    }
}
