//! The KV block manager as one would first write it: scans for everything, whole prefixes instead
//! of hash chains. The property test holds [`super::Kv`] equal to it.

use super::key::Scope;

#[derive(Clone, Default)]
struct Block {
    /// Whole token prefix up to this block's end, if it may be hit.
    content: Option<(Scope, Vec<u32>)>,
    /// When it was last let go.
    stamp: u64,
}

pub struct NaiveKv {
    size: usize,
    blocks: Vec<Block>,
    tables: Vec<Option<(Vec<usize>, usize)>>,
    pub copying: Vec<usize>,
    clock: u64,
}

impl NaiveKv {
    pub fn new(blocks: usize, size: usize) -> Self {
        let blocks = vec![Block::default(); blocks];
        Self { size, blocks, tables: Vec::new(), copying: Vec::new(), clock: 0 }
    }

    pub fn start(&mut self, scope: &Scope, tokens: &[u32], lookup: bool) -> (usize, usize) {
        let mut hit = Vec::new();
        while lookup && (hit.len() + 1) * self.size <= tokens.len() {
            let Some(id) = self.find(scope, &tokens[..(hit.len() + 1) * self.size]) else { break };
            hit.push(id);
        }
        self.tables.push(Some((hit.clone(), 0)));
        let at = self.tables.len() - 1;
        let cramped = self.size == 1 || self.available() == 0;
        if hit.len() * self.size == tokens.len() && cramped {
            let last = hit.pop().unwrap();
            self.tables[at].as_mut().unwrap().0.pop();
            self.let_go(last);
        }
        let covered = (hit.len() * self.size).min(tokens.len() - 1);
        self.tables[at].as_mut().unwrap().1 = covered;
        (at, covered)
    }

    /// Whether there was room.
    pub fn extend(&mut self, table: usize, upto: usize) -> bool {
        let (blocks, written) = self.tables[table].clone().unwrap();
        if upto <= written {
            return true;
        }
        let at = written / self.size;
        let copy = at < blocks.len() && {
            self.refs(blocks[at]) > 1 || self.blocks[blocks[at]].content.is_some()
        };
        let more = upto.div_ceil(self.size) - blocks.len();
        if more + usize::from(copy) > self.available() {
            return false;
        }
        if copy {
            self.copying.push(blocks[at]);
            let to = self.allocate();
            self.tables[table].as_mut().unwrap().0[at] = to;
        }
        for _ in 0..more {
            let id = self.allocate();
            self.tables[table].as_mut().unwrap().0.push(id);
        }
        self.tables[table].as_mut().unwrap().1 = upto;
        true
    }

    pub fn commit(&mut self, table: usize, scope: &Scope, tokens: &[u32], settled: bool) {
        for at in 0..tokens.len() / self.size {
            let own = self.tables[table].as_ref().unwrap().0[at];
            let prefix = &tokens[..(at + 1) * self.size];
            match self.find(scope, prefix) {
                Some(same) if same == own => {}
                Some(_) if !settled => return,
                Some(same) => {
                    self.tables[table].as_mut().unwrap().0[at] = same;
                    self.let_go(own);
                }
                None => self.blocks[own].content = Some((scope.clone(), prefix.to_vec())),
            }
        }
    }

    pub fn fork(&mut self, table: usize) -> usize {
        self.tables.push(self.tables[table].clone());
        self.tables.len() - 1
    }

    pub fn release(&mut self, table: usize) {
        let (mut blocks, written) = self.tables[table].take().unwrap();
        while let Some(last) = blocks.pop() {
            self.tables[table] = Some((blocks.clone(), written));
            self.let_go(last);
        }
        self.tables[table] = None;
    }

    pub fn copies_done(&mut self) {
        while !self.copying.is_empty() {
            let id = self.copying.remove(0);
            self.let_go(id);
        }
    }

    pub fn available(&self) -> usize {
        (0..self.blocks.len()).filter(|&id| self.refs(id) == 0).count()
    }

    /// (free, cached, live)
    pub fn usage(&self) -> (usize, usize, usize) {
        let idle: Vec<_> = self.blocks.iter().enumerate().filter(|b| self.refs(b.0) == 0).collect();
        let cached = idle.iter().filter(|b| b.1.content.is_some()).count();
        (idle.len() - cached, cached, self.blocks.len() - idle.len())
    }

    /// Every prefix that may be hit.
    pub fn contents(&self) -> Vec<(Scope, Vec<u32>)> {
        self.blocks.iter().filter_map(|b| b.content.clone()).collect()
    }

    pub fn table(&self, table: usize) -> &(Vec<usize>, usize) {
        self.tables[table].as_ref().unwrap()
    }

    fn find(&self, scope: &Scope, prefix: &[u32]) -> Option<usize> {
        let same = |b: &Block| b.content.as_ref().is_some_and(|c| c.0 == *scope && c.1 == prefix);
        self.blocks.iter().position(same)
    }

    fn refs(&self, id: usize) -> usize {
        let tables = self.tables.iter().flatten().flat_map(|t| &t.0);
        tables.chain(&self.copying).filter(|&&b| b == id).count()
    }

    fn let_go(&mut self, id: usize) {
        self.clock += 1;
        if self.refs(id) == 0 {
            self.blocks[id].stamp = self.clock;
        }
    }

    fn allocate(&mut self) -> usize {
        let idle = (0..self.blocks.len()).filter(|&id| self.refs(id) == 0);
        let key = |&id: &usize| (self.blocks[id].content.is_some(), self.blocks[id].stamp);
        let id = idle.min_by_key(key).unwrap();
        self.blocks[id].content = None;
        id
    }
}
