import { readScan } from '@leasehold/nestjs/dist/claim/step-values';
import type { LeasedJob } from '@leasehold/nestjs/dist/claim/leased-job';

const A = ['q', 'a'] as const;
const B = ['q', 'b'] as const;

/** What a claim for two lanes concludes. `scan`: cut, fleet, paused, asked of A, asked of B. */
function read(
  scan: number[],
  gave: { a?: number; b?: number },
  want = 50,
  limits = [100, 100],
  capped = 0,
  queueLimits: (number | null)[] = [],
) {
  const jobs = [
    ...Array.from({ length: gave.a ?? 0 }, () => ({ queue: 'q', kind: 'a', suspect: false }) as LeasedJob),
    ...Array.from({ length: gave.b ?? 0 }, () => ({ queue: 'q', kind: 'b', suspect: false }) as LeasedJob),
  ];
  const request = { workerId: 'w', want, lanes: [A, B], limits, queueLimits, suspects: 0 as const };
  const { empty, exhausted } = readScan(
    `1,1,1,${[...scan.slice(0, 3), capped, ...scan.slice(3)].join(',')}`,
    request,
    jobs,
  );
  return { empty: empty.map(([, kind]) => kind).join(''), exhausted: exhausted.map(Number).join('') };
}

describe('what a claim concludes of its lanes', () => {
  it.each([
    [
      'a rival has the row of one lane locked: the other one still holds plenty',
      [0, 1, 0, 1, 49],
      { b: 49 },
      'a',
      '10',
    ],
    ['a rival has all of it locked, and the other lane was asked for nothing', [0, 1, 0, 50, 0], {}, 'a', '10'],
    ['each gave what it had, which was less than wanted', [0, 1, 0, 2, 3], { a: 2, b: 3 }, 'ab', '00'],
    ['each gave what it was asked for, and may have more', [0, 1, 0, 20, 30], { a: 20, b: 30 }, '', '00'],
    ['bytes cut it short', [1, 1, 0, 20, 20], { a: 20, b: 1 }, '', '00'],
    ['a queue is paused: nothing is known of what it holds', [0, 1, 1, 0, 5], { b: 5 }, 'ab', '00'],
  ])('%s', (_what, scan, gave, empty, exhausted) => {
    expect(read(scan, gave)).toEqual({ empty, exhausted });
  });

  it('a kind that gave as many as it may is not empty', () => {
    expect(read([0, 1, 0, 5, 3], { a: 5, b: 3 }, 50, [5, 100]).empty).toBe('');
  });

  it('limits of the fleet left less than was wanted: nothing more is to be had before a place is given back', () => {
    expect(read([0, 1, 0, 5, 0], { a: 5 }, 50, [100, 100], 1)).toEqual({ empty: 'ab', exhausted: '00' });
    expect(read([0, 1, 0, 50, 0], { a: 50 }, 50, [100, 100], 1).empty).toBe('');
  });

  it('… but a lane that gave as many as this process may run goes on', () => {
    expect(read([0, 1, 0, 2, 5], { a: 2, b: 5 }, 50, [100, 5], 1).empty).toBe('a');
    expect(read([0, 1, 0, 2, 5], { a: 2, b: 5 }, 50, [100, 100], 1, [null, 7]).empty).toBe('a');
  });
});
