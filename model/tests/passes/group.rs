//! Tensor ranks as threads of one process.

use dunlin_model::engine::{Collective, CollectiveError};
use std::sync::{Arc, Barrier, Mutex};

/// One rank's end of a group.
pub struct Member {
    rank: usize,
    slots: Arc<Vec<Mutex<Vec<f32>>>>,
    barrier: Arc<Barrier>,
}

pub fn group(ranks: usize) -> Vec<Member> {
    let slots = Arc::new((0..ranks).map(|_| Mutex::new(Vec::new())).collect::<Vec<_>>());
    let barrier = Arc::new(Barrier::new(ranks));
    let member = |rank| Member { rank, slots: slots.clone(), barrier: barrier.clone() };
    (0..ranks).map(member).collect()
}

impl Member {
    fn exchange(&self, mine: &[f32]) -> Vec<Vec<f32>> {
        *self.slots[self.rank].lock().unwrap() = mine.to_vec();
        self.barrier.wait();
        let all = self.slots.iter().map(|slot| slot.lock().unwrap().clone()).collect();
        self.barrier.wait();
        all
    }
}

impl Collective for Member {
    fn size(&self) -> usize {
        self.slots.len()
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let all = self.exchange(values);
        for (i, value) in values.iter_mut().enumerate() {
            *value = all.iter().map(|part| part[i]).sum();
        }
        Ok(())
    }

    fn all_gather(&mut self, rows: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError> {
        let all = self.exchange(values);
        let mut joined = Vec::new();
        for row in 0..rows {
            for part in &all {
                let cols = part.len() / rows;
                joined.extend_from_slice(&part[row * cols..(row + 1) * cols]);
            }
        }
        Ok(joined)
    }
}
