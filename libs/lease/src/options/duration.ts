/** Milliseconds as a number, or text with a unit: '500ms', '30s', '5m', '2h', '1d'. */
export type Duration = number | `${number}${'ms' | 's' | 'm' | 'h' | 'd'}`;

const UNITS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };

export const DURATION_SYNTAX = "milliseconds as a number, or text such as '500ms', '30s', '5m', '2h', '1d'";

/** @returns whole milliseconds, or undefined if `value` is no duration. */
export function parseDuration(value: unknown): number | undefined {
  if (typeof value === 'number') return Number.isFinite(value) && value >= 0 ? Math.round(value) : undefined;
  if (typeof value !== 'string') return undefined;
  const match = /^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$/.exec(value.trim());
  return match ? Math.round(Number(match[1]) * (UNITS[match[2] ?? ''] ?? NaN)) : undefined;
}

export function formatDuration(ms: number): string {
  for (const unit of ['d', 'h', 'm', 's']) {
    const size = UNITS[unit] ?? 1;
    if (ms >= size && ms % size === 0) return `${ms / size}${unit}`;
  }
  return `${ms}ms`;
}
