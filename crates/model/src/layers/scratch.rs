//! One pool of scratch for parts that run one at a time.

use gpurun_types::{Bytes, DType, View};

use crate::Tensor;

/// Scratch of `bytes` bytes, as whole fp32 elements (at least one, so that no tensor is empty).
pub(super) fn workspace(name: &'static str, bytes: Bytes) -> Tensor {
    let elements = (bytes.0 as usize).div_ceil(DType::F32.size()).max(1);
    Tensor { name, elements, dtype: DType::F32 }
}

/// The list from which each of `lists` can be served while no other is in use: the k-th tensor of a name and type is the
/// largest k-th tensor of that name and type in any list.
pub(super) fn merge(lists: &[Vec<Tensor>]) -> Vec<Tensor> {
    let mut pool: Vec<Tensor> = Vec::new();
    for list in lists {
        let mut taken = vec![false; pool.len()];
        for want in list {
            match find(&pool, &taken, want) {
                Some(i) => {
                    taken[i] = true;
                    pool[i].elements = pool[i].elements.max(want.elements);
                }
                None => {
                    pool.push(want.clone());
                    taken.push(true);
                }
            }
        }
    }
    pool
}

/// The views of `wanted` out of `views`, which are those of `pool`, a result of [`merge`].
pub(super) fn serve(pool: &[Tensor], views: &[View], wanted: &[Tensor]) -> Vec<View> {
    let mut taken = vec![false; pool.len()];
    wanted
        .iter()
        .map(|want| {
            let i = find(pool, &taken, want).expect("the pool was merged from lists that include this one");
            taken[i] = true;
            views[i].slice(0, want.elements)
        })
        .collect()
}

fn find(pool: &[Tensor], taken: &[bool], want: &Tensor) -> Option<usize> {
    pool.iter().zip(taken).position(|(have, taken)| !taken && have.name == want.name && have.dtype == want.dtype)
}

#[cfg(test)]
mod tests {
    use gpurun_types::ArenaId;

    use super::*;

    fn tensor(name: &'static str, elements: usize) -> Tensor {
        Tensor { name, elements, dtype: DType::F32 }
    }

    #[test]
    fn a_pool_serves_each_list_with_distinct_views_of_the_right_size() {
        let _limit = testkit::time_limit(10);
        let lists = [vec![tensor("a", 3), tensor("a", 9), tensor("b", 1)], vec![tensor("b", 7), tensor("a", 5)]];
        let pool = merge(&lists);
        assert_eq!(pool, [tensor("a", 5), tensor("a", 9), tensor("b", 7)]);
        let views: Vec<View> = pool
            .iter()
            .enumerate()
            .map(|(i, t)| View { arena: ArenaId(i as u32), offset: 0, len: t.elements, dtype: t.dtype })
            .collect();
        for list in &lists {
            let served = serve(&pool, &views, list);
            for (view, want) in served.iter().zip(list) {
                assert_eq!((view.len, pool[view.arena.0 as usize].name), (want.elements, want.name));
            }
            let mut arenas: Vec<_> = served.iter().map(|v| v.arena).collect();
            arenas.dedup();
            assert_eq!(arenas.len(), list.len());
        }
    }
}
