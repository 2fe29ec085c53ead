/** The value below which this share of the samples lies; NaN without samples. */
export function percentile(samples: readonly number[], share: number): number {
  const sorted = Float64Array.from(samples).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? NaN;
}

/** The middle sample, or the mean of the two in the middle; undefined without samples. */
export function median(samples: readonly number[]): number | undefined {
  const sorted = Float64Array.from(samples).sort();
  const middle = sorted.length / 2;
  const [low, high] = [sorted[Math.ceil(middle) - 1], sorted[Math.floor(middle)]];
  return low === undefined || high === undefined ? undefined : (low + high) / 2;
}

/** To four significant digits, as nothing here is known better. */
export function rounded(value: number): number {
  return Number.isFinite(value) ? Number(value.toPrecision(4)) : 0;
}
