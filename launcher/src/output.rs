//! A worker's output, cut at line ends without losing a byte.

/// Longest piece that waits for its line end, in bytes.
const MAX_LINE: usize = 64 << 10;

/// Holds back an unfinished line until it is finished, too long, or the last.
#[derive(Debug, Default)]
pub struct LineSplitter {
    rest: Vec<u8>,
}

impl LineSplitter {
    /// Takes what was read; gives whole lines, line ends included. A line longer than 64 KiB comes in pieces. A carriage
    /// return ends a line too, so that a progress bar drawn with it is seen.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let before = self.rest.len();
        self.rest.extend_from_slice(bytes);
        // The rest held no line end before, except a carriage return at its very end.
        let from = before.saturating_sub(1);
        let last = self.rest.len().saturating_sub(1);
        let is_end = |(index, byte): (usize, &u8)| match byte {
            b'\n' => true,
            // At the very end it may be the first half of \r\n.
            b'\r' => from + index < last,
            _ => false,
        };
        let end = self.rest[from..].iter().enumerate().rposition(is_end).map(|index| from + index + 1);
        match end {
            Some(end) => {
                let rest = self.rest.split_off(end);
                Some(std::mem::replace(&mut self.rest, rest))
            }
            None if self.rest.len() >= MAX_LINE => Some(std::mem::take(&mut self.rest)),
            None => None,
        }
    }

    /// The last words, when no more will come.
    pub fn finish(&mut self) -> Option<Vec<u8>> {
        (!self.rest.is_empty()).then(|| std::mem::take(&mut self.rest))
    }
}

/// The lines of a piece, without their ends (`\n`, `\r\n` or `\r`).
pub fn lines(piece: &[u8]) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut index = 0;
    while index < piece.len() {
        match piece[index] {
            b'\n' => {
                lines.push(&piece[start..index]);
                start = index + 1;
            }
            b'\r' => {
                lines.push(&piece[start..index]);
                index += usize::from(piece.get(index + 1) == Some(&b'\n'));
                start = index + 1;
            }
            _ => {}
        }
        index += 1;
    }
    if start < piece.len() {
        lines.push(&piece[start..]);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_however_it_is_cut() {
        let _limit = testkit::time_limit(20);
        let mut text = b"one\ntwo\r\n\n10%\r20%\r\nlast \xff".to_vec();
        text.extend(vec![b'x'; 3 * MAX_LINE]);
        for cut in [1, 2, 3, 5, 1000, text.len()] {
            let mut splitter = LineSplitter::default();
            let mut pieces: Vec<Vec<u8>> = text.chunks(cut).filter_map(|part| splitter.feed(part)).collect();
            pieces.extend(splitter.finish());
            assert_eq!(pieces.concat(), text, "cut every {cut} bytes");
            let shown: Vec<&[u8]> = pieces.iter().flat_map(|piece| lines(piece)).collect();
            assert_eq!(shown[..5], [&b"one"[..], b"two", b"", b"10%", b"20%"], "cut every {cut} bytes");
        }
    }

    #[test]
    fn a_line_without_end_does_not_grow_without_end() {
        let _limit = testkit::time_limit(10);
        let mut splitter = LineSplitter::default();
        assert_eq!(splitter.feed(b"abc"), None);
        assert_eq!(splitter.feed(&[b'x'; MAX_LINE]).map(|piece| piece.len()), Some(MAX_LINE + 3));
        assert_eq!(splitter.feed(b"end"), None);
        assert_eq!(splitter.finish().as_deref(), Some(&b"end"[..]));
        assert_eq!(splitter.finish(), None);
    }
}
